"""Build the web application: pages, static files, the stream of events, and the actions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import errors, jobs
from shoal.history import acting_as
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.pool.api import ComputePool
from shoal.pool.holder import acting_for
from shoal.pool.spec import PoolSpec
from shoal.pool.status import LeaseStatus
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.home import is_own_store, use_store
from shoal.ui.access import Access, Viewer, require_action, require_permission
from shoal.ui.live import StoreReader
from shoal.ui.pages import Pages

log = logging.getLogger("shoal.ui")

_STREAM_S = 30.0
"""Seconds after which the server ends a stream of events, and the browser opens a new stream. A server that stops waits
for its open requests, so each stream must be short."""

_KEEP_ALIVE_S = 10.0
"""Seconds without an event after which the server sends an empty message, so that proxies do not close the stream."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
)

_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
}

_STATIC = Path(__file__).parent / "static"


async def current_viewer(request: Request) -> Viewer:
    """Return the user of a request, as the application's access rule determines, and use the store of the page."""
    access: Access = request.app.state.access
    viewer = await run_in_threadpool(access.viewer, request)
    if viewer.page_team != request.path_params.get("team"):
        raise HTTPException(404, "there is no page of this team, or you are no member of the team")
    use_store(viewer.store)
    request.state.pages = await run_in_threadpool(_pages_of, request.app, viewer.store)
    return viewer


CurrentViewer = Annotated[Viewer, Depends(current_viewer)]

router = APIRouter()


@dataclass(frozen=True)
class EngineRequest:
    """Request that the user's browser sends to the workflow engine, which then checks the user's permissions.

    Attributes:
        path: Path on the server of the page.
        body: Body of the POST request, as JSON.
        question: Sentence that asks the user for a confirmation.
    """

    path: str
    body: Mapping[str, Any]
    question: str


def create_app(*, access: Access, train_again: Callable[[str], EngineRequest] | None = None) -> FastAPI:
    """Build the web application. All its URLs are relative, so the application can be mounted below any prefix. The
    pages of teams with stores of their own are at ``teams/TEAM/``.

    Args:
        access: Decides who may see and change what, and in which store.
        train_again: Returns, for the holder of a failed job, the request with which the engine trains again what failed
            in the holder's run. None: the page is not part of an engine.

    Raises:
        StoreError: The store cannot be opened.
    """
    app = FastAPI(
        title="shoal",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(current_viewer)],
    )
    app.state.access = access
    app.state.train_again = train_again
    app.state.pages = {}
    app.state.reader = _pages_of(app, None).reader
    app.include_router(router)
    app.include_router(router, prefix="/teams/{team}")
    app.add_middleware(_SecureHeaders)
    for kind in (StarletteHTTPException, RequestValidationError, errors.ShoalError):
        app.add_exception_handler(kind, _on_error)
    return app


def _pages_of(app: FastAPI, store: str | None) -> Pages:
    """Return the pages of the store that this thread uses, which all its viewers share."""
    kept: dict[str | None, Pages] = app.state.pages
    if store not in kept:  # without a lock, because a store that does not answer must not delay the others
        made = Pages(StoreReader(Store()), _static_version(), may_train_again=app.state.train_again is not None)
        kept.setdefault(store, made)
    return kept[store]


class _SecureHeaders:
    """Add security headers, such as a content security policy, to each response. Headers that a route has already set
    are not changed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                new = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in new if each[0] not in given)]
            await send(message)

        await self._app(scope, receive, with_headers)


@router.get("/", name="overview")
@router.get("/pools/{subject}", name="pool")
@router.get("/jobs", name="jobs")
@router.get("/jobs/{subject}", name="job")
@router.get("/models", name="models")
@router.get("/models/{subject}", name="model")
@router.get("/history", name="history")
def page(request: Request, viewer: CurrentViewer) -> HTMLResponse:
    """Return the HTML of a page. The route's name selects the page, and the URL's path names the pool, job or model."""
    pages: Pages = request.state.pages
    depth = request.url.path.removeprefix(request.scope.get("root_path") or "").count("/") - 1
    depth -= 2 if viewer.page_team else 0
    html = pages.render(
        request.scope["route"].name,
        request.path_params.get("subject", ""),
        dict(request.query_params),
        viewer=viewer,
        root="../" * depth or "./",
        is_fragment=request.headers.get("x-shoal-fragment") == "1",
    )
    return HTMLResponse(html)


@router.get("/static/{name}")
def static_file(name: str) -> Response:
    """Return a script, style sheet or image of the page."""
    path = static_files().get(name)
    if path is None:
        raise HTTPException(404, f"there is no static file {name!r}")
    # The browser may cache the file, because the file's URL changes whenever a static file changes.
    return FileResponse(path, headers={"cache-control": "private, max-age=86400"})


@router.get("/api/events")
async def events(request: Request) -> StreamingResponse:
    """Send an event each time the store changes. The browser then requests the page's new contents."""
    reader: StoreReader = request.state.pages.reader

    async def stream() -> AsyncIterator[str]:
        changed = reader.subscribe()
        loop = asyncio.get_running_loop()
        end = loop.time() + _STREAM_S
        try:
            yield "retry: 1000\n\n"
            while not reader.is_closed and (left := end - loop.time()) > 0:
                try:
                    await asyncio.wait_for(changed.wait(), min(left, _KEEP_ALIVE_S))
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                changed.clear()
                yield "event: changed\ndata: {}\n\n"
        finally:
            reader.unsubscribe(changed)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


@router.post("/api/actions/{name}")
def act(request: Request, viewer: CurrentViewer, name: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Carry out an action that the user has requested on the page, see `_ACTIONS`."""
    require_action(request, viewer)
    if name not in _ACTIONS:
        raise HTTPException(404, f"there is no action {name!r}: use one of {', '.join(sorted(_ACTIONS))}")
    reader: StoreReader = request.state.pages.reader
    check_arguments(name, arguments)
    require_permission(viewer, *owners_of(reader.store, name, arguments))
    try:
        with acting_for(viewer.team), acting_as(viewer.name):
            done = _ACTIONS[name](reader.store, viewer.name, **arguments)
    finally:
        reader.read_again()
    return {"done": done}


@router.get("/api/train-again/{job_id}/{attempt}")
def train_again(request: Request, viewer: CurrentViewer, job_id: str, attempt: int) -> EngineRequest:
    """Return the request with which the engine trains again what failed in the run of a job."""
    if request.app.state.train_again is None:
        raise HTTPException(404, "this page is not part of a workflow engine")
    reader: StoreReader = request.state.pages.reader
    job = attempts.load(reader.store, Key(job_id, attempt))
    require_permission(viewer, job.holder, job.team)  # the request names tasks of the run
    return cast(EngineRequest, request.app.state.train_again(job.holder))


def static_files() -> dict[str, Path]:
    """Return the paths of the static files by name. Plotly's script comes from the installed package `plotly`."""
    own = {path.name: path for path in _STATIC.iterdir() if path.suffix in (".js", ".css", ".svg")}
    spec = find_spec("plotly")  # `plotly` is not imported, because the import takes 0.5 s
    folders = spec.submodule_search_locations if spec else None
    return {**own, "plotly.min.js": Path(next(iter(folders or [""])), "package_data", "plotly.min.js")}


@lru_cache(maxsize=1)
def _static_version() -> str:
    digest = hashlib.sha256()
    for name, path in sorted(static_files().items()):
        digest.update(f"{name}:{path.stat().st_size}:".encode())
        if path.parent == _STATIC:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


async def _on_error(request: Request, error: Exception) -> Response:
    message, headers = redact(str(error)), dict[str, str]()
    match error:
        case StarletteHTTPException():
            status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
        case RequestValidationError():
            status, message = 400, "the request is not valid: reload the page"
        case errors.PoolNotFoundError() | errors.JobNotFoundError() | errors.ModelNotFoundError():
            status = 404
        case errors.TeamError():
            status = 403
        case errors.InvalidArgumentError():
            status = 400
        case errors.StoreError():
            status = 503
        case _:
            status = 409
    if 300 <= status < 400:
        return Response(status_code=status, headers=headers)
    if "text/html" in request.headers.get("accept", "") and request.method == "GET":
        pages: Pages = request.app.state.pages[None]
        return HTMLResponse(pages.error(status, message), status, headers)
    return JSONResponse({"error": message}, status, headers)


def release(store: Store, actor: str, *, pool: str, lease_id: str) -> str:
    """Release a lease of a pool, and return a sentence about the result.

    Raises:
        InvalidArgumentError: The lease was already released, or has expired.
    """
    holder = _held(store, pool=pool, lease_id=lease_id).holder
    released = ComputePool(pool, holder=holder, store=store).release()
    return f"the lease of {holder} was released" if released else f"{holder} had no lease any more"


def sweep(store: Store, actor: str) -> str:
    """End nodes that no pool needs, record the end of lost jobs, and return a text that lists these actions.

    Raises:
        InvalidArgumentError: This machine is no host of the store's pools.
    """
    if not is_own_store():
        raise errors.InvalidArgumentError(
            "this server is no host of the team's pools: run `shoal sweep` on their hosts"
        )
    return "; ".join(jobs.sweep(store)) or "nothing to sweep"


def cancel(store: Store, actor: str, *, job_id: str, attempt: int) -> str:
    """Cancel an attempt of a job, and return a sentence about the result."""
    handle = jobs.attach(job_id, attempt, store=store)
    cancelled = handle.cancel(f"cancelled by {actor} on shoal's page")
    done = f"job {job_id} was cancelled" if cancelled else f"job {job_id} had already ended"
    return f"{done}; {handle.left}" if handle.left else done


def dismiss(store: Store, actor: str, *, job_id: str, attempt: int) -> str:
    """Dismiss the failure of an attempt of a job, and return a sentence about the result.

    Raises:
        InvalidArgumentError: The attempt has not failed.
    """
    attempts.dismiss(store, Key(job_id, attempt), time.time())
    return f"the failure of job {job_id} was dismissed for all users"


def alter(store: Store, actor: str, *, pool: str, min_nodes: int, max_nodes: int) -> str:
    """Change a pool's minimum and maximum number of nodes, and return a sentence about the result."""
    ComputePool(pool, store=store).alter(min_nodes=min_nodes, max_nodes=max_nodes)
    return f"pool {pool} now has {min_nodes} to {max_nodes} nodes"


def owners_of(store: Store, name: str, arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the holder and the team of the job or lease that an action concerns. For an action about a pool, the
    holder is None.

    Raises:
        ShoalError: There is no such job, pool or lease.
    """
    match name:
        case "cancel" | "dismiss":
            job = attempts.load(store, Key(arguments["job_id"], arguments["attempt"]))
            return job.holder, job.team
        case "release":
            lease = _held(store, **arguments)
            return lease.holder, lease.team
        case "alter":
            return None, PoolSpec.parse(ComputePool(arguments["pool"], store=store).describe().uri).only_team
    return None, None


def _held(store: Store, *, pool: str, lease_id: str) -> LeaseStatus:
    """Return a lease of a pool.

    Raises:
        InvalidArgumentError: The lease was already released, or has expired.
    """
    held = {lease.id: lease for lease in ComputePool(pool, store=store).describe().leases}
    if lease_id not in held:
        raise errors.InvalidArgumentError(
            f'the lease of pool "{pool}" was already released or has expired, so nothing was changed: reload the page'
        )
    return held[lease_id]


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Check the arguments of an action.

    Raises:
        InvalidArgumentError: An argument is missing, unknown, or of a wrong type.
    """
    kinds = get_type_hints(_ACTIONS[name])
    wanted = {key: kind for key, kind in kinds.items() if key not in ("store", "actor", "return")}
    given = {key: type(value) for key, value in arguments.items()}
    if given != wanted:
        needed = ", ".join(f"{key} ({kind.__name__})" for key, kind in wanted.items()) or "no argument"
        raise errors.InvalidArgumentError(
            f"the arguments of the action {name} are not valid: the action needs {needed}"
        )


_ACTIONS: dict[str, Callable[..., str]] = {
    action.__name__: action for action in (release, sweep, cancel, dismiss, alter)
}
"""The function for each action, by the name of the action. The keyword-only arguments of the function come from the
request."""
