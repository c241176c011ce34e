"""Decide which requests may see the web page, and which requests may change pools and jobs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote, urlencode, urlsplit

from fastapi import HTTPException, Request

CSRF_HEADER = "x-shoal-csrf"
"""Name of the header with the user's CSRF token. Browsers do not let pages of other sites set this header."""


@dataclass(frozen=True)
class Viewer:
    """The user who has sent a request to the web page.

    Attributes:
        name: Name of the user, as the record of actions shows it.
        may_act: Whether the user may sweep and alter pools that belong to no team.
        may_end_some: Function that returns whether the user may cancel jobs and release leases of any run. Only pages
            with buttons ask, because the answer may cost a query.
        may_end: Function that returns whether the user may cancel the jobs and release the leases of a holder and a
            team; the team is None if they belong to no team.
        may_read: Function that returns whether the user may see the jobs of a holder.
        csrf_token: Secret of the user's session. Every action must send it in the header `X-Shoal-CSRF`.
        may_act_for: Function that returns whether the user may alter the pools of a team.
        team: Team for which the user's actions ask the store. ``"*"``: this object alone decides about teams. None:
            ``$SHOAL_TEAM`` of the server.
        page_team: Team in the path, ``teams/TEAM/``, if the user may see its page; otherwise the request is refused
            (404). None: the page of the server's own store.
        store: URL of the store that the page shows. None: the store of the server.
        teams_to_see: Function that returns the teams with stores of their own that the user may see, for the menu.
    """

    name: str
    may_act: bool
    csrf_token: str
    may_end_some: Callable[[], bool]
    may_end: Callable[[str, str | None], bool]
    may_read: Callable[[str], bool] = lambda holder: True
    may_act_for: Callable[[str], bool] = lambda team: True
    team: str | None = None
    page_team: str | None = None
    store: str | None = field(default=None, repr=False)
    teams_to_see: Callable[[], Sequence[str]] = tuple


class Access(Protocol):
    """Rule that decides which requests may see the web page."""

    def viewer(self, request: Request) -> Viewer:
        """Return the user of a request. FastAPI calls this method in a thread, so the method may block.

        Raises:
            HTTPException: The request may not see the page (status 401 or 403).
        """


class TokenAccess:
    """Access rule of `shoal ui`: a user needs the link that the command has printed, which contains a token.

    The first request has the token in its URL. The answer stores a key in a cookie and redirects to the same URL
    without the token, so that the token is not in the browser's history. Later requests need the cookie.
    """

    def __init__(self, token: str, name: str) -> None:
        self._token = token
        self._name = name
        self._key = self._derived("cookie")
        self._csrf = self._derived("csrf")

    def viewer(self, request: Request) -> Viewer:
        """Return the user who has sent a request, if the request has the right cookie.

        Raises:
            HTTPException: The request has the right token in its URL (status 303, which sets the cookie), or it has
                neither the right token nor the right cookie (status 401).
        """
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), self._token.encode()):
            # With `SameSite=Strict`, the browser would not send the cookie after the redirect if the user had opened
            # the link from a file or from another site. `Lax` is safe, because each action also needs the CSRF token.
            path = f"{request.scope.get('root_path', '')}/"
            cookie = f"{_cookie_name(request)}={self._key}; Path={path}; HttpOnly; SameSite=Lax"
            left = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            # Without the leading "./", the browser would interpret a name with a colon, such as a job's id, as an
            # absolute URL.
            page = f"./{quote(request.scope['path'].rpartition('/')[2], safe='')}{'?' if left else ''}{urlencode(left)}"
            raise HTTPException(303, headers={"Location": page, "Set-Cookie": cookie})
        cookie = request.cookies.get(_cookie_name(request), "")
        if not secrets.compare_digest(cookie.encode(), self._key.encode()):
            raise HTTPException(401, "this page needs the link that `shoal ui` has printed: open that link again")
        return Viewer(
            self._name,
            may_act=True,
            csrf_token=self._csrf,
            may_end_some=lambda: True,
            may_end=lambda holder, team: True,
        )

    def _derived(self, purpose: str) -> str:
        return hmac.new(self._token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def require_action(request: Request, viewer: Viewer) -> None:
    """Check that the user has sent a request for an action from a page of this server.

    Raises:
        HTTPException: The CSRF token is wrong, or a page of another site has sent the request (403).
    """
    token = request.headers.get(CSRF_HEADER, "")
    if not secrets.compare_digest(token.encode(), viewer.csrf_token.encode()):
        raise HTTPException(403, "the request has no valid CSRF token: reload the page")
    # Browsers send the header `Sec-Fetch-Site` only over HTTPS and to loopback addresses. They send the header `Origin`
    # with every POST request.
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is not None and urlsplit(origin).netloc == request.headers.get("host"):
        site = "same-origin"
    if site != "same-origin":
        raise HTTPException(403, "the request was sent by a page of another site: use the buttons of shoal's page")


def require_permission(viewer: Viewer, holder: str | None, team: str | None) -> None:
    """Check that the user may carry out an action.

    Args:
        viewer: The user.
        holder: Holder of the job or lease that the action ends. None: the action is about a pool.
        team: Team to which the job, lease or pool belongs; None if it belongs to no team.

    Raises:
        HTTPException: The user may not (403).
    """
    if holder is None and not viewer.may_act:
        raise HTTPException(
            403,
            "you may see this page, but you may not change pools, because only users who may edit Airflow's "
            "connections can do that: ask your administrator for this permission",
        )
    if holder is None and team is not None and not viewer.may_act_for(team):
        raise HTTPException(
            403,
            f'you may see this page, but you may not change pools of team "{team}": ask the team to do it, or your '
            "administrator to add you to the team",
        )
    if holder is not None and not viewer.may_end(holder, team):
        of_team = "" if team is None else f' of team "{team}"'
        raise HTTPException(
            403,
            f"you may see this page, but you may not end jobs and leases of {holder}{of_team}: ask your administrator "
            "for the permission to edit the runs of its DAG or, if it is no DAG of this Airflow, Airflow's connections "
            "and a membership in the team",
        )


def _cookie_name(request: Request) -> str:
    """Return the cookie's name, which contains the port. Browsers send a host's cookies to all ports of the host, so
    each server on the host needs its own cookie name."""
    return f"shoal_ui_{request.url.port or 80}"
