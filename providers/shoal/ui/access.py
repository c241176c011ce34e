"""Decide which requests may see the page, and which may act on pools and jobs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urlencode, urlsplit

from fastapi import HTTPException, Request

CSRF_HEADER = "x-shoal-csrf"
"""Name of the header with the viewer's CSRF token. A page of another site cannot set it without permission."""


@dataclass(frozen=True)
class Viewer:
    """The user of one request.

    Attributes:
        name: Name of the user, as the record of actions shows it.
        may_act: Whether the user may release leases, sweep, cancel jobs and alter pools.
        csrf_token: Secret of the user's session. Every action must send it in the header `X-Shoal-CSRF`.
    """

    name: str
    may_act: bool
    csrf_token: str


class Access(Protocol):
    """Rule that decides which requests may see the page."""

    def viewer(self, request: Request) -> Viewer:
        """Return the user of a request. FastAPI calls the method in a thread, so it may block.

        Raises:
            HTTPException: The request may not see the page (status 401 or 403).
        """


class TokenAccess:
    """Access of `shoal ui`: a request needs the token of the printed link.

    The first request has the token in its URL. The answer stores a key in a cookie and redirects to the same URL
    without the token, so that the token is not in the browser's history.

    Args:
        token: Token of the link.
        name: Name of the user, for the record of actions.
    """

    def __init__(self, token: str, name: str) -> None:
        self._token = token
        self._name = name
        self._key = self._derived("cookie")
        self._csrf = self._derived("csrf")

    def viewer(self, request: Request) -> Viewer:
        """Return the user, if the request has the cookie.

        Raises:
            HTTPException: The request has the right token in its URL (303, which sets the cookie), or neither a token
                nor a cookie that is right (401).
        """
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), self._token.encode()):
            raise HTTPException(303, headers={"Location": _without_token(request), "Set-Cookie": self._cookie(request)})
        cookie = request.cookies.get(_cookie_name(request), "")
        if not secrets.compare_digest(cookie.encode(), self._key.encode()):
            raise HTTPException(401, "this page needs the link that `shoal ui` has printed: open that link again")
        return Viewer(self._name, may_act=True, csrf_token=self._csrf)

    def _derived(self, purpose: str) -> str:
        return hmac.new(self._token.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def _cookie(self, request: Request) -> str:
        # With `SameSite=Strict`, the browser would not send the cookie after the redirect of a link in another page or
        # in a file. Actions need the CSRF token, so requests of other sites cannot act.
        path = request.scope.get("root_path") or "/"
        return f"{_cookie_name(request)}={self._key}; Path={path}; HttpOnly; SameSite=Lax"


def require_action(request: Request, viewer: Viewer) -> None:
    """Check that a request may change something.

    Raises:
        HTTPException: The user may only look, the CSRF token is wrong, or another site has sent the request (403).
    """
    if not viewer.may_act:
        raise HTTPException(403, "you may see this page, but not act: ask for the permission to edit connections")
    token = request.headers.get(CSRF_HEADER, "")
    if not secrets.compare_digest(token.encode(), viewer.csrf_token.encode()):
        raise HTTPException(403, "the request has no valid CSRF token: reload the page")
    if not _is_same_origin(request):
        raise HTTPException(403, "the request was sent by the page of another site")


def _is_same_origin(request: Request) -> bool:
    """Return whether the browser says that a page of this server has sent the request.

    Browsers send `Sec-Fetch-Site` over HTTPS and to loopback only. They send `Origin` with every POST.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")


def _cookie_name(request: Request) -> str:
    """Return the cookie's name. It contains the port, because browsers send cookies to all ports of a host."""
    return f"shoal_ui_{request.url.port or 80}"


def _without_token(request: Request) -> str:
    """Return the URL of a request without its token, relative to the request's own URL."""
    left = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
    # The leading "./" keeps a name with a colon, such as a job's id, from being read as an address of its own.
    name = quote(request.scope["path"].rpartition("/")[2], safe="")
    return f"./{name}{'?' if left else ''}{urlencode(left)}"
