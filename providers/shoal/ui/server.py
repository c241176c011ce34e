"""Serve the web page on this machine, for the command `shoal ui`."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import webbrowser
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from shoal.errors import InvalidArgumentError
from shoal.pool.holder import cli_holder
from shoal.state.home import subfolder
from shoal.ui.access import TokenAccess
from shoal.ui.app import create_app
from shoal.ui.live import StoreReader

_HOST = "127.0.0.1"

_GRACE_S = 2
"""Seconds for which the server waits for open requests after Ctrl-C."""


class _Server(uvicorn.Server):
    """Web server that ends all streams of events when the server stops. Uvicorn's own server would wait for these
    streams."""

    def __init__(self, config: uvicorn.Config, reader: StoreReader, link: str, *, opens_browser: bool) -> None:
        super().__init__(config)
        self._reader = reader
        self._link = link
        self._opens_browser = opens_browser
        self._redirect: Path | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # The link is printed only after the server has begun to listen, so that a program can open the link at once.
        print(f"shoal ui: {self._link}", flush=True)
        if self._opens_browser:
            self._redirect = redirect_file(self._link)
            webbrowser.open(self._redirect.as_uri())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._reader.close()
        await super().shutdown(sockets)
        if self._redirect is not None:
            self._redirect.unlink(missing_ok=True)


def redirect_file(link: str) -> Path:
    """Write an HTML file that redirects to a link, and return the file's path. Other users cannot read the file.

    The browser is started with the path of this file instead of the link, because the link contains the token, and
    other users of the machine can see the arguments of the browser's process.
    """
    descriptor, path = tempfile.mkstemp(".html", "page-", subfolder("ui"))  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={link}"><title>shoal</title>'
            f'<a href="{link}">Open the page</a>\n'
        )
    return Path(path)


def below(prefix: str, app: ASGIApp) -> Starlette:
    """Return an application that serves another application at the paths ``/<prefix>/``, and nothing at other paths.

    Browsers send a host's cookies to all its ports, and so to servers of other users of this machine. But the page's
    cookie has the path of the page, so browsers send it only to paths with the prefix, which nobody else knows.
    """
    return Starlette(routes=[Mount(f"/{prefix}", app)])


def serve(port: int, *, opens_browser: bool) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C or SIGTERM, and print the link with the token.

    Raises:
        InvalidArgumentError: The port is in use.
        StoreError: The store cannot be opened.
    """
    token, prefix = secrets.token_urlsafe(24), secrets.token_urlsafe(16)
    app = create_app(access=TokenAccess(token, cli_holder()))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
        except OSError as error:
            raise InvalidArgumentError(
                f"port={port} cannot be used ({error.strerror}): choose another port, or remove --port"
            ) from None
        link = f"http://{_HOST}:{listener.getsockname()[1]}/{prefix}/?token={token}"
        config = uvicorn.Config(
            below(prefix, app),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
        )
        # On a signal, Uvicorn's server ends and raises the signal again. Here a signal is the normal end, not an error.
        with suppress(KeyboardInterrupt):
            _Server(config, app.state.reader, link, opens_browser=opens_browser).run(sockets=[listener])
