"""Define the commands `shoal pool …` (start, scale, show and stop pools) and `shoal sweep` (end nodes that no pool
needs, and record the end of jobs whose process has died)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import output
from shoal.errors import InvalidArgumentError, PoolNotFoundError
from shoal.pool.options.base import is_pool_name
from shoal.pool.spec import AUTO
from shoal.pool.timeouts import RETIRE_WITHIN, ROLLBACK_AFTER

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.pool.api import ComputePool
    from shoal.pool.status import PoolStatus

app = typer.Typer(no_args_is_help=True, help="Start, scale, show and stop compute pools.")

_MOST_JOBS = 10_000
"""Largest number of unfinished jobs that `shoal pool describe` reads and counts."""

_MOST_HOLDERS = 20
"""Largest number of holders whose use of nodes `shoal pool describe` prints. With --json, the command prints all
holders."""

_DEFAULT_POOL = "Default: $SHOAL_POOL, or the only pool that is up."

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help=f"Name of the pool. {_DEFAULT_POOL}")]
RequiredName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pool.")]
PoolOption = Annotated[str | None, typer.Option("--pool", metavar="NAME", help=f"Name of the pool. {_DEFAULT_POOL}")]
RollbackAfter = Annotated[
    float, typer.Option(metavar="SECONDS", help="Seconds until an unfinished change is rolled back.")
]

_ROLLING_BACK = "rolling back (interrupt again to leave the rollback to the reconciler)"
_ROLLED_BACK = "interrupted: everything that this command had started was rolled back"


@app.command()
def up(
    source: Annotated[
        str, typer.Argument(metavar="URI|NAME", help="local://NAME?max_nodes=4, or the name of an existing pool.")
    ],
    rollback_after: RollbackAfter = ROLLBACK_AFTER,
    as_json: output.Json = False,
) -> None:
    """Start a pool, and wait until its minimum number of nodes (min_nodes) is ready."""
    try:
        pool = _pool(source)
    except PoolNotFoundError as error:
        if is_pool_name(source):
            error.add_note(f"to create the pool: `shoal pool up local://{source}`")
        raise
    with output.on_interrupt(_ROLLING_BACK, _ROLLED_BACK), output.PoolProgress(f"starting {pool.name}") as progress:
        pool.up(rollback_after_seconds=rollback_after, on_progress=progress)
    _show(pool.describe(), as_json)


@app.command("list")
def list_(as_json: output.Json = False) -> None:
    """List all pools in the state store, with the temporary (embedded) pools of jobs and processes that run now."""
    from shoal.pool.api import list_pools

    pools = list_pools(embedded=True)
    rows = [
        (
            pool.name,
            pool.state,
            output.describe_counts(pool),
            f"{pool.min_nodes}-{pool.max_nodes}",
            pool.host,
            _note(pool),
        )
        for pool in pools
    ]
    columns = ("POOL", "STATE", "NODES", "LIMITS", "HOST", "NOTE")
    empty = "no pools: create one with `shoal pool up local://NAME`"
    output.show_list({"pools": [pool.to_dict() for pool in pools]}, columns, rows, empty, as_json=as_json)


@app.command()
def describe(name: Name = None, as_json: output.Json = False) -> None:
    """Show a pool: state, limits, nodes, leases, last operation, and its running and waiting jobs."""
    from shoal.cli.doctor_checks import reconciler
    from shoal.jobs import list_jobs
    from shoal.pool.journal.usage import USAGE_DAYS
    from shoal.state.schema import JOB_ACTIVE

    pool = _pool(name)
    status, used = pool.describe(), pool.usage()
    unfinished = list_jobs(status.name, states=JOB_ACTIVE, limit=_MOST_JOBS)
    waiting = sorted((job for job in unfinished if job.position is not None), key=lambda job: job.position or 0)
    running = len(unfinished) - len(waiting)
    named = ("job_id", "attempt", "holder", "priority", "position")
    queue = [{name: getattr(job, name) for name in named} for job in waiting]
    document = {**status.to_dict(), "jobs": {"running": running, "waiting": queue}, "usage": used}
    parts = _parts(status)
    if unfinished:
        parts += ["", f"jobs: {running} running, {len(waiting)} waiting for room"]
    if used:
        rows = [
            (one.holder, one.nodes, round(one.lease_node_seconds), round(one.job_node_seconds))
            for one in used[:_MOST_HOLDERS]
        ]
        title = f"used in the last {USAGE_DAYS:g} days"
        columns = ("HOLDER", "NODES NOW", "NODE-SECONDS OF LEASES", "OF JOBS")
        parts += ["", output.table(columns, rows, title=title)]
    output.show_result(document, *parts, as_json=as_json)
    if (check := reconciler([status])).status != "ok":
        output.say(f"the reconciler {check.found}: {check.advice}")


@app.command()
def nodes(name: Name = None, as_json: output.Json = False) -> None:
    """List the active nodes of a pool, with the Ray head node first."""
    pool = _pool(name)
    active = pool.get_nodes()
    rows = [(node["name"], node["cpus"], node["gpus"]) for node in active]
    document = {"pool": pool.name, "nodes": active}
    output.show_list(document, ("NODE", "CPUS", "GPUS"), rows, f"pool {pool.name} has no active node", as_json=as_json)


def _size(text: str) -> int | str:
    if text != AUTO and not text.isdecimal():
        raise typer.BadParameter(f'"{text}" is neither an integer nor auto')
    return text if text == AUTO else int(text)


_SIZE = typer.Argument(metavar="SIZE|auto", parser=_size, help="Nodes, including the head; or auto, with --plan-for.")


@app.command()
def scale(
    size: Annotated[Any, _SIZE],
    plan_for: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="File with the spec of a training: auto is the smallest size on which it fits."
        ),
    ] = None,
    pool_name: PoolOption = None,
    is_async: Annotated[
        bool, typer.Option("--async", help="Return when the request is stored, without waiting for the nodes.")
    ] = False,
    rollback_after: RollbackAfter = ROLLBACK_AFTER,
    block_until_min_cluster_size: Annotated[
        int | None,
        typer.Option(
            "--min", metavar="K", help="Return when K nodes are ready. The others keep starting until the deadline."
        ),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Set a pool's number of nodes, and wait until the nodes are ready. If nodes do not become ready, restore the
    previous number."""
    from shoal.cli.jobs import read_spec
    from shoal.kinds.plan.call import planned_size

    pool = _pool(pool_name)
    planner = partial(planned_size, pool, read_spec(plan_for), output.say) if plan_for else None
    options: dict[str, Any] = {"rollback_after_seconds": rollback_after}
    if block_until_min_cluster_size is not None:
        options["block_until_min_cluster_size"] = block_until_min_cluster_size
    with (
        output.on_interrupt(_ROLLING_BACK, _ROLLED_BACK),
        output.PoolProgress(f"scaling {pool.name} to {size}") as progress,
    ):
        pool.scale(size, plan_for=planner, is_async=is_async, options=options, on_progress=progress)
    _show(pool.describe(), as_json)


@app.command()
def alter(
    name: RequiredName,
    min_nodes: Annotated[int | None, typer.Option(metavar="N", help="Smallest size while the pool is up.")] = None,
    max_nodes: Annotated[int | None, typer.Option(metavar="N", help="Greatest size of the pool.")] = None,
    as_json: output.Json = False,
) -> None:
    """Change the minimum and the maximum number of nodes of a pool."""
    if min_nodes is None and max_nodes is None:
        raise InvalidArgumentError("no new limit is given: add --min-nodes, --max-nodes or both")
    pool = _pool(name)
    pool.alter(min_nodes=min_nodes, max_nodes=max_nodes)
    _show(pool.describe(), as_json)


@app.command()
def retire(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, as `shoal pool nodes` shows it.")],
    pool_name: PoolOption = None,
    within: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds until the node ends.")] = RETIRE_WITHIN,
    as_json: output.Json = False,
) -> None:
    """Announce that a node will end soon, so that the pool starts a replacement before the node ends."""
    pool = _pool(pool_name)
    pool.retire_node(node, within_s=within)
    _show(pool.describe(), as_json)


@app.command()
def quota(
    name: RequiredName,
    team: Annotated[str, typer.Argument(metavar="TEAM", help="Name of the team.")],
    max_nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Most nodes that the team's leases may take together.")
    ] = None,
    node_hours: Annotated[
        float | None, typer.Option(metavar="H", help="Node-hours that the team may use within 30 days.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Limit the nodes and node-hours of a team on a pool. If no limit is given, remove the team's quota."""
    pool = _pool(name)
    pool.set_quota(team, max_nodes=max_nodes, node_hours=node_hours)
    _show(pool.describe(), as_json)


@app.command()
def down(
    name: Name = None,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Do not contact the cluster of a ray:// pool, which is gone for good.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Stop all nodes and jobs of a pool, and wait until they have ended."""
    pool = _pool(name)
    goes_on = f"interrupted: pool {pool.name} still goes down; see its state with `shoal pool describe {pool.name}`"
    with output.on_interrupt("stopped waiting", goes_on), output.PoolProgress(f"stopping {pool.name}") as progress:
        pool.down(abandon=abandon, on_progress=progress)
    _show(pool.describe(), as_json)


@app.command()
def delete(
    name: RequiredName,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Remove a pool whose host or ray:// cluster is gone for good.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Remove a pool that is down, with its token and logs. The pool's ended jobs stay in the list of jobs."""
    pool = _pool(name)
    pool.delete(abandon=abandon)
    output.show_result({"pool": pool.name, "deleted": True}, f"pool {pool.name} was deleted", as_json=as_json)


def sweep(as_json: output.Json = False) -> None:
    """End the nodes on this machine that no pool needs any more, and record the end of jobs whose process has died.
    You can run this command at any time."""
    from shoal import jobs
    from shoal.cli.doctor_checks import leftovers
    from shoal.history import acting_as
    from shoal.pool.holder import cli_holder
    from shoal.state import Store

    with acting_as(cli_holder()):
        did = jobs.sweep()
    left = leftovers(Store())
    lines = did or ["nothing to sweep"]
    if left:
        lines = [*lines, f"nodes that could not be ended: {', '.join(left)}"]
    output.show_result({"did": did, "left": left}, *lines, as_json=as_json)
    if left:
        raise typer.Exit(output.ExitCode.FAILED)


def _pool(source: str | None) -> ComputePool:
    from shoal.pool.api import ComputePool
    from shoal.pool.holder import cli_holder

    return ComputePool(source, holder=cli_holder())


def _show(status: PoolStatus, as_json: bool) -> None:
    output.show_result(status.to_dict(), *_parts(status), as_json=as_json)


def _parts(status: PoolStatus) -> list[RenderableType]:
    last = status.last_operation
    ended = last and f"{last.kind} to {last.size} by {last.holder}, {output.when(last.created_at)}: {last.state}"
    facts = [
        ("pool", status.name),
        ("state", status.state),
        ("nodes", output.describe_counts(status)),
        ("limits", f"{status.min_nodes} to {status.max_nodes} nodes"),
        ("note", _note(status)),
        ("last operation", ended),
        ("host", status.host),
        ("URI", status.uri),
    ]
    parts: list[RenderableType] = [output.fields(facts)]
    everyone = [*status.active, *status.pending, *status.failed, *status.leaving]
    if everyone:
        rows = [
            (
                node.name,
                "head" if node.is_head else "worker",
                node.state,
                node.cpus,
                node.gpus,
                "yes" if node.busy else "no",
                node.error or (f"ends by {output.when(node.leaving_at)}" if node.leaving_at else None),
            )
            for node in everyone
        ]
        parts += ["", output.table(("NODE", "ROLE", "STATE", "CPUS", "GPUS", "BUSY", "NOTE"), rows)]
    if status.quotas:
        limits = [(team, of["max_nodes"], of["node_hours"]) for team, of in sorted(status.quotas.items())]
        parts += ["", output.table(("QUOTA OF TEAM", "NODES", "NODE-HOURS IN 30 DAYS"), limits)]
    if status.leases:
        from shoal.pool.holder import job_of

        leased = [
            (
                lease.holder,
                lease.team,
                lease.size,
                "exclusive" if lease.exclusive else "shared",
                "granted" if lease.position is None else status.queue_note(lease.holder),
                output.when(lease.expires_at) if job_of(lease.holder) is None else "the end of the job",
            )
            for lease in status.leases
        ]
        parts += ["", output.table(("LEASE OF", "TEAM", "NODES", "KIND", "STATE", "UNTIL"), leased)]
    return parts


def _note(status: PoolStatus) -> str | None:
    belongs = status.embedded_in and f"embedded, ends with {status.embedded_in}"
    return "; ".join(filter(None, (belongs, status.reason))) or None
