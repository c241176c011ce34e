"""Commands `shoal many …`: process the partitions of a table in one job, and list and show partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli import jobs
from shoal.cli.jobs import Detach, JobId, NewJobId, SpecFile
from shoal.cli.output import Json, fields, print_json, show, show_list
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shoal.jobs import PartitionResult, PartitionResults

app = typer.Typer(no_args_is_help=True, help="Call a function, or train a model, for each partition of a table.")


@app.command()
def run(
    spec: SpecFile,
    pool_name: Annotated[
        str | None, typer.Option("--pool", metavar="NAME", help="Pool to run on. Default: the pool in the spec.")
    ] = None,
    job_id: NewJobId = None,
    detach: Detach = False,
    as_json: Json = False,
) -> None:
    """Process all partitions of a table as one job. The spec is that of `shoal train`, with `"framework":
    "partitions"`, which may be left out."""
    jobs.run_spec(
        jobs.read_spec(spec, framework="partitions"), pool_name=pool_name, job_id=job_id, detach=detach, as_json=as_json
    )


@app.command("list")
def list_(
    job_id: JobId,
    state: Annotated[
        Literal["succeeded", "failed"] | None, typer.Option(help="List only partitions in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Greatest number of lines.")] = 100,
    as_json: Json = False,
) -> None:
    """List the partitions of a job that have ended: those that failed first, then the slowest first."""
    found = _results(job_id)
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
    show_list(
        {"counts": counts, "partitions": [_plain(each) for each in chosen[:limit]]},
        ("KEY", "STATE", "ROWS", "TOOK", "ATTEMPTS", "ERROR"),
        rows,
        "no partition has ended",
        as_json=as_json,
    )
    if not as_json and rows:
        show(f"{counts['succeeded']:,} partitions succeeded, {counts['failed']:,} failed")


@app.command("show")
def show_(
    job_id: JobId,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the partition, as `shoal many list` shows it.")],
    as_json: Json = False,
) -> None:
    """Show the outcome of a partition, and the end of what its function has printed."""
    found = next((each for each in _results(job_id) if str(each.key) == key), None)
    if found is None:
        raise InvalidArgumentError(
            f"job {job_id} has no partition {key} that has ended: see `shoal many list {job_id}`"
        )
    plain = _plain(found)
    if as_json:
        print_json({**plain, "log": found.log})
        return
    del plain["metrics"]
    show(fields([*plain.items(), *((f"metric {name}", value) for name, value in found.metrics.items())]))
    if found.log:
        show(found.log.rstrip("\n"))


def _results(job_id: str) -> PartitionResults:
    from shoal.jobs import partitions_so_far

    return partitions_so_far(job_id)


def _plain(result: PartitionResult) -> dict[str, object]:
    names = ("status", "rows", "seconds", "attempts", "metrics", "error")
    return {"key": str(result.key), **{name: getattr(result, name) for name in names}}
