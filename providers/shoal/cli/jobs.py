"""Commands `shoal train`, `shoal tune` (submit a job), `shoal jobs …` (list, show, follow, cancel, remove jobs) and
`shoal many …` (process the partitions of a table in one job, list and show them)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from shoal import jobs
from shoal.cli import output
from shoal.errors import InvalidArgumentError, NoPoolError
from shoal.option_validation import duration
from shoal.training.reporting import ProgressDisplay

if TYPE_CHECKING:
    from shoal.jobs.journal.metric_points import MetricPoint
    from shoal.kinds.search.study_storage import Ended


app = typer.Typer(no_args_is_help=True, help="List, show, follow, cancel and remove training jobs.")

T = TypeVar("T")

_FOLLOW_S = 2.0
"""Seconds between two reads of the metrics. The driver stores new ones every 5 s."""

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job. The command uses its newest attempt.")]

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")]

SpecFile = Annotated[str, typer.Argument(metavar="SPEC.json", help="File with the job spec as JSON; - reads stdin.")]
SpecPool = Annotated[
    str | None, typer.Option("--pool", metavar="NAME", help="Pool to run on. Default: the pool in the spec.")
]
NewJobId = Annotated[
    str | None, typer.Option(metavar="ID", help="Id of the job. Attaches to the job if it runs. Default: a new id.")
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Return when the job is submitted. The job then runs to its end.")
]


def train(
    spec: SpecFile,
    pool_name: SpecPool = None,
    job_id: NewJobId = None,
    detach: Detach = False,
    as_json: output.Json = False,
) -> None:
    """Train on a pool: submit a job, print its log on stderr, and print its result. If no pool is named and no pool is
    up, start a pool for the job."""
    run_spec(read_spec(spec), pool_name=pool_name, job_id=job_id, detach=detach, as_json=as_json)


def tune(
    spec: Annotated[str, typer.Argument(metavar="SPEC.json", help="File with the spec of a search; - reads stdin.")],
    pool_name: SpecPool = None,
    job_id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Id of the job. Continues its search if it has failed. Default: a new id."),
    ] = None,
    detach: Detach = False,
    as_json: output.Json = False,
) -> None:
    """Search for the parameters of a model on a pool: submit a job, print its log on stderr, and print its trials and
    its result."""
    run_spec(read_spec(spec, framework="tune"), pool_name=pool_name, job_id=job_id, detach=detach, as_json=as_json)


def run_spec(fields: dict[str, Any], *, pool_name: str | None, job_id: str | None, detach: bool, as_json: bool) -> None:
    """Submit the job that fields of a spec and options of the command describe, follow it unless it is detached, and
    print its result."""
    from shoal.pool.holder import cli_holder

    job = _parse(fields, pool_name=pool_name, job_id=job_id, detach=detach)
    with output.on_interrupt("cancelling the job", "interrupted: the job was cancelled"), _pool_of(job, detach) as name:
        handle = jobs.submit(job.on_pool(name), holder=cli_holder())
        result = None if detach else _follow(handle)
    if result is not None:
        trials: list[Ended] = []
        if result.search:
            from shoal.kinds.search import study_storage
            from shoal.state import Store

            trials = study_storage.read_trials(Store(), result.job_id, result.search.study)
        if as_json:
            output.print_json({**result.model_dump(mode="json"), **({"trials": trials} if result.search else {})})
            return
        if result.search:
            rows = [
                (
                    each.number,
                    each.state,
                    None if each.value is None else f"{each.value:.6g}",
                    ", ".join(f"{name}={value}" for name, value in each.params.items()),
                    None if each.seconds is None else f"{each.seconds:.1f} s",
                    _brief(each.error),
                )
                for each in trials
            ]
            output.show(output.table(("TRIAL", "STATE", "VALUE", "PARAMETERS", "TOOK", "ERROR"), rows), "")
        output.show(_result_table(result))
    else:
        document = {"job_id": handle.job_id, "attempt": handle.attempt, "pool": handle.pool}
        text = f"submitted job {handle.job_id}: follow its log with `shoal jobs logs {handle.job_id} --follow`"
        output.show_result(document, text, as_json=as_json)


@app.command("list")
def list_(
    pool_name: Annotated[
        str | None, typer.Option("--pool", metavar="NAME", help="List only jobs of this pool.")
    ] = None,
    limit: output.Limit = 100,
    as_json: output.Json = False,
) -> None:
    """List jobs, the newest first. A job that was started several times has one line per attempt."""

    found = jobs.list_jobs(pool_name, limit=limit)
    output.require_pool_if(not found, pool_name)
    rows = [
        (
            job.job_id,
            job.attempt,
            job.about or None,
            job.pool,
            _state(job),
            job.progress and job.progress.brief,
            output.when(job.created_at),
            f"{job.ended_at - job.started_at:.0f} s" if job.started_at and job.ended_at else None,
            _brief(job.error),
        )
        for job in found
    ]
    columns = ("JOB", "ATTEMPT", "FOR", "POOL", "STATE", "PROGRESS", "CREATED", "TOOK", "ERROR")
    output.show_list({"jobs": found}, columns, rows, "no jobs", as_json=as_json)


@app.command("show")
def show_(job_id: JobId, as_json: output.Json = False) -> None:
    """Show the status and the result of a job."""
    status = _attach(job_id).status()
    facts = [
        ("job", status.job_id),
        ("for", status.label),
        ("task", status.task),
        ("attempt", status.attempt),
        ("state", _state(status)),
        ("priority", status.priority or None),
        ("progress", status.progress),
        ("error", status.error),
        ("pool", status.pool),
        ("submitted by", status.holder),
        ("team", status.team),
        ("created", output.when(status.created_at)),
        ("started", output.when(status.started_at)),
        ("ended", output.when(status.ended_at)),
        ("node-seconds", None if status.result else status.node_seconds),
        ("MLflow run", None if status.result else status.mlflow_run_id),
    ]
    result = ["", _result_table(status.result)] if status.result is not None else []
    output.show_result(status, output.fields(facts), *result, as_json=as_json)


@app.command()
def logs(job_id: JobId, follow: Follow = False, as_json: output.Json = False) -> None:
    """Print a job's log."""
    handle = _attach(job_id)
    with output.on_interrupt("stopped following the log", f"interrupted: job {job_id} goes on"):
        lines = _print_each(handle.logs(follow=follow), str, follow=follow, as_json=as_json)
    if as_json:
        output.print_json({"job_id": handle.job_id, "attempt": handle.attempt, "lines": lines})


@app.command()
def metrics(job_id: JobId, follow: Follow = False, as_json: output.Json = False) -> None:
    """Print a job's metrics by step: each boosting round, counted from 0, or what a function has logged."""

    def str_of(point: MetricPoint) -> str:
        return "\t".join([str(point.step), *(f"{name}: {value:.6g}" for name, value in point.values.items())])

    handle = _attach(job_id)
    with output.on_interrupt("stopped following the metrics", f"interrupted: job {job_id} goes on"):
        points = _print_each(_metrics(handle, follow=follow), str_of, follow=follow, as_json=as_json)
    if as_json:
        output.print_json({"job_id": handle.job_id, "attempt": handle.attempt, "metrics": points})


def _print_each(items: Iterator[T], text_of: Callable[[T], str], *, follow: bool, as_json: bool) -> list[T]:
    """Print each line of a log, or each point of a series. With `as_json`, return them for the JSON document, and print
    them only if the command follows them, on stderr."""
    kept = []
    for item in items:
        if as_json:
            kept.append(item)
        if follow or not as_json:
            typer.echo(text_of(item), err=as_json)
    return kept


def _metrics(handle: jobs.JobHandle, *, follow: bool) -> Iterator[MetricPoint]:
    """Yield the metrics so far, and with `follow` those that are new, until the job has ended."""
    seen: set[float] = set()
    while True:
        has_ended = not follow or handle.has_ended
        for point in handle.metrics():
            if point.at not in seen:  # no two points of an attempt have the same time
                seen.add(point.at)
                yield point
        if has_ended:
            return
        time.sleep(_FOLLOW_S)


@app.command()
def cancel(job_id: JobId, as_json: output.Json = False) -> None:
    """Cancel a job. A job that has already ended is not changed."""
    handle = _attach(job_id)
    with output.on_interrupt(
        "stopped waiting", f"interrupted: see whether the job has ended with `shoal jobs show {job_id}`"
    ):
        cancelled = handle.cancel("cancelled with `shoal jobs cancel`")
    state = handle.status().state.value
    done = {"job_id": handle.job_id, "attempt": handle.attempt, "cancelled": cancelled, "state": state}
    text = f"job {job_id} was cancelled" if cancelled else f"job {job_id} had already ended: {state}"
    output.show_result({**done, "left": handle.left}, *filter(None, (text, handle.left)), as_json=as_json)


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Time since a job's end: hours, days or weeks, such as 12w.")
    ] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing. Print what would be removed.")] = False,
    as_json: output.Json = False,
) -> None:
    """Remove jobs that ended long ago, with their logs and models in $SHOAL_HOME. Models in MLflow stay."""

    removed = jobs.prune_jobs(older_than=duration(older_than), dry_run=dry_run)
    rows = [(each.job_id, each.attempt, each.state.value, output.when(each.ended_at)) for each in removed]
    parts = [output.table(("JOB", "ATTEMPT", "STATE", "ENDED"), rows)] if removed else []
    total = f"{len(removed)} attempts {'would be removed' if dry_run else 'removed'}"
    output.show_result({"dry_run": dry_run, "removed": removed}, *parts, total, as_json=as_json)


def _pool_of(job: jobs.AnyJobSpec, detach: bool) -> AbstractContextManager[str]:
    """Return a context manager that yields the name of a job's pool. The context manager may start a temporary pool for
    the job.
    """
    from shoal.distributors.call_pool import pool_for_job
    from shoal.pool.selection import which_pool
    from shoal.state import Store

    name = job.run_config.pool_name
    if not detach:
        return pool_for_job(job)
    try:
        return nullcontext(which_pool(Store(), name))
    except NoPoolError as error:
        error.add_note("with --detach, the job needs a pool that stays up when this command has returned")
        raise


def _follow(handle: jobs.JobHandle) -> jobs.JobResult:
    try:
        output.say(f"submitted {handle.job_id} to pool {handle.pool}; Ctrl-C cancels the job")
        # Without a terminal, `ProgressDisplay` would print lines about the progress. The job's log already contains
        # such lines, so `first_line_s=inf` turns them off here.
        with ProgressDisplay(first_line_s=math.inf) as display:
            return handle.wait(on_log=partial(typer.echo, err=True), on_progress=display.show)
    except KeyboardInterrupt:
        # `wait` cancels the job on Ctrl-C. But Ctrl-C may have been pressed before `wait` began, so the job is
        # cancelled here as well. Cancelling a job twice does no harm.
        handle.cancel("the process that waited for the job was interrupted")
        raise


def _attach(job_id: str) -> jobs.JobHandle:
    from shoal.pool.holder import cli_holder

    return jobs.attach(job_id, actor=cli_holder())


def read_spec(source: str, framework: str | None = None) -> dict[str, Any]:
    """Read a job spec from a JSON or YAML file, or as JSON from stdin if `source` is "-".

    Args:
        source: Path of the file, or "-".
        framework: The only framework that the spec may have, and its default.
    """
    from shoal.jobs.spec_text import fields_of

    what = "the spec on stdin" if source == "-" else f'the spec "{source}"'
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    # ValueError is raised if the path contains a NUL character, or if the text is not UTF-8.
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{what} cannot be read: {error}") from None
    found = fields_of(text, what, source)
    if framework and found.setdefault("framework", framework) != framework:
        raise InvalidArgumentError(
            f'{what} has framework="{found["framework"]}", but this command takes framework="{framework}": use '
            "`shoal train`"
        )
    return found


def _parse(fields: dict[str, Any], *, pool_name: str | None, job_id: str | None, detach: bool) -> jobs.AnyJobSpec:
    """Build the job spec from the fields of the JSON file and the options of the command."""

    options: dict[str, Any] = {"pool_name": pool_name, "job_id": job_id}
    options = {name: value for name, value in options.items() if value is not None}
    if detach:
        options["orphan_after"] = None
    given = fields.get("run_config") or {}
    if isinstance(given, dict):
        fields = {**fields, "run_config": {**given, **options}}
    return jobs.parse_spec(fields)


def _brief(text: str | None) -> str | None:
    """Return the first line of a job's error, for the list of jobs. `shoal jobs show` prints the whole error."""
    return text.splitlines()[0] if text else text


def _state(job: jobs.JobStatus) -> str:
    """Return a job's state as text. If the job waits in its pool's queue, the text contains its place in the queue."""
    return job.state.value if job.position is None else f"{job.state.value}, position {job.position}"


def _result_table(result: jobs.JobResult) -> Any:
    plain = result.model_dump(mode="json")
    plain["plan"] = result.plan and result.plan["reasoning"]
    pairs: list[tuple[str, Any]] = []
    for name, value in plain.items():
        if isinstance(value, dict):
            pairs += [(f"{name} {key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            pairs.append((name, ", ".join(map(str, getattr(result, name)))))
        else:
            pairs.append((name, value))
    return output.fields((name.replace("_", " "), value) for name, value in pairs)


many_app = typer.Typer(no_args_is_help=True, help="Call a function, or train a model, for each partition of a table.")


@many_app.command("run")
def run_partitions(
    spec: SpecFile,
    pool_name: SpecPool = None,
    job_id: NewJobId = None,
    max_failed: Annotated[
        str | None,
        typer.Option(
            help="Number of partitions that may fail, or their share, such as 0.05; by default that in SPEC, or 0."
        ),
    ] = None,
    detach: Detach = False,
    as_json: output.Json = False,
) -> None:
    """Process all partitions of a table as one job. The spec is that of `shoal train`, with `"framework":
    "partitions"`, which may be left out. If more partitions fail than may, the command fails after all results are
    stored."""
    fields = read_spec(spec, framework="partitions")
    if max_failed is not None:
        fields["max_failed"] = max_failed
    run_spec(fields, pool_name=pool_name, job_id=job_id, detach=detach, as_json=as_json)


@many_app.command("list")
def list_partitions(
    job_id: JobId,
    state: Annotated[
        Literal["succeeded", "failed"] | None, typer.Option(help="List only partitions in this state.")
    ] = None,
    limit: output.Limit = 100,
    as_json: output.Json = False,
) -> None:
    """List the partitions of a job that have ended: those that failed first, then the slowest first."""

    found = jobs.partitions_so_far(job_id)
    chosen = sorted(
        (each for each in found if state in (None, each.status)),
        key=lambda each: (each.status == "succeeded", -each.seconds),
    )
    rows = [
        (
            str(each.key),
            each.status,
            each.rows,
            f"{each.seconds:.2f} s",
            each.attempts,
            each.error.split("\n")[0] or None,
        )
        for each in chosen[:limit]
    ]
    counts = found.counts
    output.show_list(
        {"counts": counts, "partitions": [_plain_partition(each) for each in chosen[:limit]]},
        ("KEY", "STATE", "ROWS", "TOOK", "ATTEMPTS", "ERROR"),
        rows,
        "no partition has ended",
        as_json=as_json,
    )
    if not as_json and rows:
        output.show(f"{counts['succeeded']:,} partitions succeeded, {counts['failed']:,} failed")


@many_app.command("show")
def show_partition(
    job_id: JobId,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the partition, as `shoal many list` shows it.")],
    as_json: output.Json = False,
) -> None:
    """Show the outcome of a partition, and the end of what its function has printed."""

    found = next((each for each in jobs.partitions_so_far(job_id) if str(each.key) == key), None)
    if found is None:
        raise InvalidArgumentError(
            f"job {job_id} has no partition {key} that has ended: see `shoal many list {job_id}`"
        )
    plain = _plain_partition(found)
    if as_json:
        output.print_json({**plain, "log": found.log})
        return
    del plain["metrics"]
    output.show(output.fields([*plain.items(), *((f"metric {name}", value) for name, value in found.metrics.items())]))
    if found.log:
        output.show(found.log.rstrip("\n"))


def _plain_partition(result: jobs.PartitionResult) -> dict[str, object]:
    names = ("status", "rows", "seconds", "attempts", "metrics", "error")
    return {"key": str(result.key), **{name: getattr(result, name) for name in names}}
