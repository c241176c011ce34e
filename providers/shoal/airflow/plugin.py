"""Airflow plugin that shows the page with pools, jobs and models inside Airflow, at ``/shoal/``.

API servers, schedulers and workers all load plugins. So this package imports only modules that Airflow has loaded
already, and builds the page at the first request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from shoal.errors import MissingExtraError

log = logging.getLogger(__name__)

_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]]


def has_extra() -> bool:
    """Return whether the extra ``ui`` is installed. Only plotly is looked up, because Airflow always installs the
    extra's other packages."""
    return find_spec("plotly") is not None


def _page() -> _App:
    if not has_extra():
        raise MissingExtraError("plotly", "ui")
    from shoal.airflow.page import AirflowAccess, train_again
    from shoal.ui.app import create_app

    return create_app(access=AirflowAccess(), train_again=train_again)


class LazyApp:
    """ASGI application that builds another application at the first request, and passes all requests to that
    application.

    If the other application cannot be built, the request gets the status 503, and the next request tries to build it
    again.

    Args:
        build: Function that builds the application. Default: the page, for users of Airflow.
    """

    def __init__(self, build: Callable[[], _App] = _page) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._app: _App | None = None

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        """Build the other application if necessary, and pass the request to that application."""
        if self._app is None:
            try:
                # Build in a thread, because opening the store and loading modules would block the event loop.
                await asyncio.to_thread(self._build_once)
            except Exception as error:
                log.exception("the page of shoal cannot be built")
                # The user is not authenticated yet, so the answer must not contain details of the store. The log has
                # the whole error.
                why = str(error) if isinstance(error, MissingExtraError) else "see the log of Airflow's API server"
                if scope["type"] != "http":
                    await send({"type": "websocket.close", "code": 1011})
                    return
                headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 503, "headers": headers})
                body = f"the page of shoal is not available: {why}".encode()
                await send({"type": "http.response.body", "body": body})
                return
        assert self._app is not None
        await self._app(scope, receive, send)

    def _build_once(self) -> None:
        with self._lock:
            if self._app is None:
                self._app = self._build()


PREFIX = "/shoal"
"""Path of the page below the base URL of Airflow."""


def page_path() -> str:
    """Return the path of the page, including the path of Airflow's base URL, such as ``/airflow/shoal/``."""
    return f"{urlsplit(conf.get('api', 'base_url', fallback='') or '').path.rstrip('/')}{PREFIX}/"


class ShoalPlugin(AirflowPlugin):
    """Plugin that Airflow finds through the entry point ``airflow.plugins``."""

    name = "shoal"
    fastapi_apps: list[Any] = [{"app": LazyApp(), "url_prefix": PREFIX, "name": "shoal"}]  # noqa: RUF012 - as Airflow declares it
    # One entry of Airflow's menu shows the page in a frame, the other in a browser tab of its own. Airflow's frame
    # allows no new windows, so links to other services work only in the tab.
    _entry = {"href": page_path(), "destination": "nav", "category": "browse"}  # noqa: RUF012
    external_views: list[Any] = (
        [{"name": "Compute pools", "url_route": "shoal", **_entry}, {"name": "Compute pools (own tab)", **_entry}]
        if has_extra()
        else []
    )
