"""Render the HTML pages from the contents that were last read from the store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from shoal.errors import JobNotFoundError, PoolNotFoundError
from shoal.history import Entry, read
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.status import JobLine
from shoal.links import dashboard_link
from shoal.pool.holder import DagRunHolder
from shoal.pool.journal import sizes
from shoal.pool.status import PoolReport
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.home import is_own_store
from shoal.state.schema import JobState, NodeState
from shoal.ui import formats
from shoal.ui.access import Viewer
from shoal.ui.formats import RunLinks
from shoal.ui.job_view import job_view
from shoal.ui.live import Overview, StoreReader
from shoal.ui.model_view import Models

PAGE_SIZE = 50
"""Number of jobs that one page of the list of jobs shows."""

_DAY_S = 86_400.0

AGES = {"day": _DAY_S, "week": 7 * _DAY_S, "month": 30 * _DAY_S}
"""Choices of the filter by age in the list of jobs, in seconds."""

STATES = ("waiting", "starting", "running", "succeeded", "failed", "cancelled")
"""Choices of the filter by state in the list of jobs."""

_KEPT_PAGES = 256

_KEPT_S = 60.0
"""Seconds after which a page is rendered again even if the store has not changed, because time is part of the page."""

_MOST_SEARCHED = 500
"""Number of newest lines about a pool, in the record of actions, in which the lines about one job are searched."""


class Pages:
    """Renderer of the HTML pages. All viewers get the same rendered page until the contents of the store change.

    Args:
        reader: Reader of the store.
        version: Version of the static files, for their URLs.
        may_train_again: Whether the engine of the page can train again what failed in a run.
    """

    def __init__(
        self,
        reader: StoreReader,
        version: str,
        *,
        may_train_again: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reader = reader
        self._clock = clock
        self._models = Models(reader.store, clock=monotonic)
        self._environment = Environment(
            loader=PackageLoader("shoal.ui"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        self._environment.filters.update(
            {
                name: getattr(formats, name)
                for name in ("duration", "iso", "utc", "size", "number", "count", "progress")
            },
            redact=redact,
            part=lambda text: quote(str(text), safe=""),
        )
        self._environment.globals.update(may_train_again=may_train_again, is_own_store=is_own_store)
        self._environment.globals.update(version=version, state_of=state_of, nodes_of=nodes_of, trouble_of=trouble_of)
        self._kept: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def render(
        self, page: str, subject: str, query: Mapping[str, str], *, viewer: Viewer, root: str, is_fragment: bool
    ) -> str:
        """Return the HTML of a page.

        Raises:
            ShoalError: The pool, job or model does not exist, or the store cannot be read.
        """
        holders = {job.holder for job in self.reader.overview().jobs}
        hidden = frozenset(holder for holder in holders if not viewer.may_read(holder))
        key = (page, subject, tuple(sorted(query.items())), viewer.may_act, viewer.may_end_some(), root, hidden)
        try:
            main = self._main(key)
        except (JobNotFoundError, PoolNotFoundError):
            self.reader.read_again()  # the job or pool may have been created after the last read of the store
            main = self._main(key)
        if is_fragment:
            return main
        return self._environment.get_template("base.html").render(
            page=page, subject=subject, root=root, viewer=viewer, main=main
        )

    def error(self, status: int, message: str) -> str:
        """Return the HTML of a page that shows an error. Users without access to other pages get this page, too."""
        return self._environment.get_template("error.html").render(status=status, message=message)

    def _main(self, key: tuple[Any, ...]) -> str:
        overview = self.reader.overview()
        of_models = self._models.version if key[0] in ("models", "model") else 0
        version = (overview.version, of_models, self._clock() // _KEPT_S)
        # If many viewers request a page at the same time, one request renders the page, and the other requests wait for
        # the result.
        with self._lock:
            kept = self._kept.get((key, version))
            if kept is None:
                page, subject, query, may_act, may_end, root, hidden = key
                overview = replace(overview, jobs=tuple(job for job in overview.jobs if job.holder not in hidden))
                context = self._context(page, subject, dict(query), overview)
                kept = self._environment.get_template(f"{page}.html").render(
                    **context, root=root, may_act=may_act, may_end=may_end, problem=overview.problem, now=self._clock()
                )
                self._kept[key, version] = kept
                while len(self._kept) > _KEPT_PAGES:
                    self._kept.popitem(last=False)
            return kept

    def _context(self, page: str, subject: str, query: Mapping[str, str], overview: Overview) -> dict[str, Any]:
        contexts: dict[str, Callable[[], dict[str, Any]]] = {
            "overview": lambda: self._overview(overview),
            "jobs": lambda: self._jobs(overview, query),
            "job": lambda: self._job(overview, subject, query),
            "pool": lambda: self._pool(overview, subject),
            "models": lambda: {"models": self._models.listed()},
            "model": lambda: {"model": self._models.described(subject)},
            "history": lambda: {"record": _recorded(self.reader.store, limit=200)},
        }
        return contexts[page]()

    def _overview(self, overview: Overview) -> dict[str, Any]:
        now = self._clock()
        running = [job for job in overview.jobs if state_of(job) in ("running", "starting")]
        waiting = sorted(
            (job for job in overview.jobs if state_of(job) == "waiting"), key=lambda job: (job.pool, job.position or 0)
        )
        failed = [job for job in overview.jobs if job.state is JobState.FAILED and now - (job.ended_at or 0) < _DAY_S]
        # First the pools that need attention, at the end those that are down.
        pools = sorted(
            overview.pools, key=lambda each: (not trouble_of(each), each.status.state == "down", each.status.name)
        )
        return {
            "pools": pools,
            "broken": [report for report in pools if trouble_of(report)],
            "running": running,
            "waiting": waiting,
            "failed": failed,
            "unhealed": [job for job in unhealed(overview.jobs) if job in failed],
            "ready": sum(len(report.status.active) for report in pools),
            "target": sum(report.status.target for report in pools),
        }

    def _jobs(self, overview: Overview, query: Mapping[str, str]) -> dict[str, Any]:
        chosen = {name: query.get(name, "").strip() for name in ("state", "pool", "holder", "age", "id")}
        now = self._clock()

        def fits(job: JobLine) -> bool:
            return (
                (not chosen["state"] or state_of(job) == chosen["state"])
                and (not chosen["pool"] or job.pool == chosen["pool"])
                and chosen["holder"].lower() in job.holder.lower()
                and chosen["id"].lower() in f"{job.job_id} {job.about}".lower()
                and (chosen["age"] not in AGES or now - job.created_at < AGES[chosen["age"]])
            )

        found = [job for job in overview.jobs if fits(job)]
        pages = max(1, -(-len(found) // PAGE_SIZE))
        asked = query.get("page", "1")
        page = min(max(1, int(asked) if asked.isdecimal() and len(asked) < 9 else 1), pages)
        left = {name: value for name, value in chosen.items() if value}
        return {
            "jobs": found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE],
            "found": len(found),
            "chosen": chosen,
            "pool_names": sorted({job.pool for job in overview.jobs} | {each.status.name for each in overview.pools}),
            "states": STATES,
            "page": page,
            "pages": pages,
            "link_to": lambda number: "?" + urlencode({**left, "page": number}),
        }

    def _job(self, overview: Overview, job_id: str, query: Mapping[str, str]) -> dict[str, Any]:
        lines = sorted((job for job in overview.jobs if job.job_id == job_id), key=lambda job: -job.attempt)
        asked = query.get("attempt")
        chosen = [line for line in lines if asked is None or str(line.attempt) == asked]
        if not chosen:
            missing = f'job "{job_id}"' if not lines else f'attempt {asked} of job "{job_id}"'
            raise JobNotFoundError(f"{missing} does not exist: choose a job from the list of jobs")
        report = next((each for each in overview.pools if each.status.name == chosen[0].pool), None)
        return {
            "job": job_view(
                self.reader.store,
                chosen[0],
                self.reader.metrics(chosen[0]),
                self.reader.logs,
                self._clock(),
            ),
            "attempts": lines,
            "has_pool": report is not None,
            "dashboard": dashboard_link(report.dashboard) if report else None,
            "record": _recorded(self.reader.store, limit=20, pool=chosen[0].pool, job_id=job_id),
        }

    def _pool(self, overview: Overview, name: str) -> dict[str, Any]:
        report = next((each for each in overview.pools if each.status.name == name), None)
        if report is None:
            raise PoolNotFoundError(name, [each.status.name for each in overview.pools])
        jobs = [job for job in overview.jobs if job.pool == name]
        return {
            "pool": report.status,
            "report": report,
            "jobs": jobs[:20],
            "jobs_count": len(jobs),
            "plot": _size_plot(report, self.reader, self._clock()),
            "dashboard": dashboard_link(report.dashboard),
            "run_link": RunLinks(self.reader.store).link,
            "record": _recorded(self.reader.store, limit=20, pool=name),
        }


def state_of(job: JobLine) -> str:
    """Return the state of a job for the page. A pending job is shown as waiting (for room on the pool) or as
    starting."""
    if job.state is JobState.PENDING:
        return "waiting" if is_waiting(job) else "starting"
    return job.state.value


def nodes_of(report: PoolReport) -> list[Any]:
    """Return all nodes of a pool: first the active nodes, then the nodes that start, leave or have failed."""
    status = report.status
    return [*status.active, *status.pending, *status.leaving, *status.failed]


def unhealed(jobs: Iterable[JobLine]) -> Iterator[JobLine]:
    """Yield the failures that need attention: for each job and each task of a workflow only the newest one, if it was
    not dismissed and no later attempt or run has succeeded.

    Args:
        jobs: Attempts of jobs, the newest first.
    """
    settled: dict[tuple[str | None, ...], str] = {}
    for job in jobs:
        if job.state not in (JobState.FAILED, JobState.SUCCEEDED):
            continue
        run = DagRunHolder.of(job.holder)
        # A flow run may have several task runs of one name, each with its own data. They do not heal each other.
        of_task = (job.task, job.label) if run is None else (job.task, run.deployment, "")
        later = settled.get(of_task) if job.task else None
        is_settled = (job.job_id,) in settled or (later is not None and (run is not None or later != job.holder))
        settled |= {(job.job_id,): job.holder, of_task: job.holder}
        if job.state is JobState.FAILED and not is_settled and job.dismissed_at is None:
            yield job


def trouble_of(report: PoolReport) -> str | None:
    """Return the reason why a pool needs attention; None if the pool needs no attention. Credentials are removed from
    the reason. A lease that waits in the queue is not a reason."""
    status = report.status
    if status.state == "down":
        return None
    for node in status.failed:
        return redact(f"{node.name} failed: {node.error or 'the reason is not known'}")
    waits = any(lease.position is not None for lease in status.leases)
    if status.reason and not (waits and status.reason.startswith("leases that wait")):
        return redact(status.reason)
    stuck = [node for node in status.leaving if node.error and node.state == NodeState.ENDING.value]
    return redact(f"{stuck[0].name} cannot be ended: {stuck[0].error}") if stuck else None


def _size_plot(report: PoolReport, reader: StoreReader, at: float) -> dict[str, Any]:
    """Return the data for the plot of a pool's ready and demanded nodes, and of the requests for a size."""
    points = sizes.points(reader.store, report.status.name, at)
    times = [formats.iso(when) for when, _, _ in points]
    return {
        "kind": "size",
        "ready": {"x": times, "y": [ready for _, ready, _ in points]},
        "target": {"x": times, "y": [target for _, _, target in points]},
        "requests": {
            "times": [formats.iso(each.created_at) for each in report.operations],
            "sizes": [each.size for each in report.operations],
            "states": [each.state for each in report.operations],
            "texts": [
                f"{'lease of' if each.kind == 'lease' else 'size'} {each.size} by {each.holder}: "
                f"{each.state.replace('_', ' ')}"
                for each in report.operations
            ],
        },
        "max_nodes": report.status.max_nodes,
    }


def _recorded(store: Store, *, limit: int, pool: str | None = None, job_id: str | None = None) -> list[Entry]:
    """Return the newest entries of the action history (see `shoal history`)."""
    if job_id is None:
        return read(pool=pool, limit=limit, store=store)
    return [line for line in read(pool=pool, limit=_MOST_SEARCHED, store=store) if line.subject == job_id][:limit]
