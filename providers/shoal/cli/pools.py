"""`shoal pool …` and `shoal sweep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.exits import ExitCode
from shoal.cli.interrupts import on_interrupt
from shoal.cli.output import Json, fields, print_json, say, show, table, when
from shoal.cli.progress import PoolProgress, describe_counts
from shoal.errors import InvalidArgumentError, PoolNotFoundError
from shoal.pool.spec import is_pool_name
from shoal.pool.tunables import ROLLBACK_AFTER

if TYPE_CHECKING:
    from shoal.pool.api import ComputePool
    from shoal.pool.status import NodeStatus, PoolStatus

app = typer.Typer(no_args_is_help=True, help="Start, scale, show and end compute pools.")

_ONE_RULE = "By default $SHOAL_POOL, or the only pool there is."

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help=f"The pool. {_ONE_RULE}")]
RollbackAfter = Annotated[
    float, typer.Option(metavar="SECONDS", help="Deadline, after which everything is rolled back.")
]

_ROLLING_BACK = "rolling back what was started (again: leave that to the reconciler)"
_ROLLED_BACK = "interrupted: what this command had started was rolled back"


@app.command()
def up(
    source: Annotated[
        str, typer.Argument(metavar="URI|NAME", help="local://NAME?max_nodes=4, or the name of a pool that exists.")
    ],
    rollback_after: RollbackAfter = ROLLBACK_AFTER,
    as_json: Json = False,
) -> None:
    """Bring a pool up and wait until its MIN_NODES are ready."""
    try:
        pool = _pool(source)
    except PoolNotFoundError as error:
        if is_pool_name(source):
            error.add_note(f"to make it: `shoal pool up local://{source}`")
        raise
    with on_interrupt(_ROLLING_BACK, _ROLLED_BACK), PoolProgress(f"bringing {pool.name} up") as progress:
        pool.up(rollback_after_seconds=rollback_after, on_progress=progress)
    _show(pool.describe(), as_json)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List every pool of this store."""
    from shoal.pool.api import list_pools

    pools = list_pools()
    if as_json:
        print_json({"pools": [pool.to_dict() for pool in pools]})
    elif not pools:
        show("no pools: `shoal pool up local://NAME` makes one")
    else:
        rows = [
            (pool.name, pool.state, describe_counts(pool), f"{pool.min_nodes}-{pool.max_nodes}", pool.host, pool.reason)
            for pool in pools
        ]
        show(table(("POOL", "STATE", "NODES", "LIMITS", "HOST", "NOTE"), rows))


@app.command()
def describe(name: Name = None, as_json: Json = False) -> None:
    """Show a pool: state, limits, nodes, leases, last operation."""
    from shoal.cli.checks import reconciler

    status = _pool(name).describe()
    _show(status, as_json)
    if (check := reconciler([status])).status != "ok":
        say(f"the reconciler {check.found}: {check.advice}")


@app.command()
def nodes(name: Name = None, as_json: Json = False) -> None:
    """List a pool's active nodes, the head first."""
    pool = _pool(name)
    active = pool.get_nodes()
    if as_json:
        print_json({"pool": pool.name, "nodes": active})
    elif not active:
        show(f"pool {pool.name} has no active node")
    else:
        show(table(("NODE", "CPUS", "GPUS"), [(node["name"], node["cpus"], node["gpus"]) for node in active]))


@app.command()
def scale(
    size: Annotated[int, typer.Argument(metavar="SIZE", help="Nodes, the head among them.")],
    pool_name: Annotated[str | None, typer.Option("--pool", metavar="NAME", help=f"The pool. {_ONE_RULE}")] = None,
    is_async: Annotated[
        bool, typer.Option("--async", help="Return as soon as the request is journaled; the reconciler carries it out.")
    ] = False,
    rollback_after: RollbackAfter = ROLLBACK_AFTER,
    block_until_min_cluster_size: Annotated[
        int | None,
        typer.Option("--min", metavar="K", help="Return at K ready nodes; the rest keep coming until the deadline."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set the number of nodes and wait until they are ready; roll back where that fails."""
    pool = _pool(pool_name)
    options: dict[str, Any] = {"rollback_after_seconds": rollback_after}
    if block_until_min_cluster_size is not None:
        options["block_until_min_cluster_size"] = block_until_min_cluster_size
    with on_interrupt(_ROLLING_BACK, _ROLLED_BACK), PoolProgress(f"scaling {pool.name} to {size}") as progress:
        pool.scale(size, is_async=is_async, options=options, on_progress=progress)
    _show(pool.describe(), as_json)


@app.command()
def alter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pool.")],
    min_nodes: Annotated[int | None, typer.Option(metavar="N", help="Nodes held while the pool is up.")] = None,
    max_nodes: Annotated[int | None, typer.Option(metavar="N", help="The most nodes it may have.")] = None,
    as_json: Json = False,
) -> None:
    """Change a pool's limits."""
    if min_nodes is None and max_nodes is None:
        raise InvalidArgumentError("nothing to change: give --min-nodes, --max-nodes or both")
    pool = _pool(name)
    pool.alter(min_nodes=min_nodes, max_nodes=max_nodes)
    _show(pool.describe(), as_json)


@app.command()
def down(
    name: Name = None,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Do not tell a ray:// pool's cluster: it never answers again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """End every node of a pool, and its jobs with them, and wait until nothing is left."""
    pool = _pool(name)
    goes_on = f"interrupted: {pool.name} goes on going down; `shoal pool describe {pool.name}` shows how far it is"
    with on_interrupt("no longer waiting", goes_on), PoolProgress(f"taking {pool.name} down") as progress:
        pool.down(abandon=abandon, on_progress=progress)
    _show(pool.describe(), as_json)


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pool.")],
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Remove a pool whose host, or whose foreign cluster, never returns.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take a pool down and remove it, with its token and logs. Its jobs stay listed."""
    pool = _pool(name)
    stays = f"interrupted: pool {pool.name} is going down and was not removed; the same command does the rest"
    with on_interrupt("no longer waiting", stays), PoolProgress(f"deleting {pool.name}") as progress:
        pool.delete(abandon=abandon, on_progress=progress)
    if as_json:
        print_json({"pool": pool.name, "deleted": True})
    else:
        show(f"pool {pool.name} was deleted")


def sweep(as_json: Json = False) -> None:
    """End what nobody owns on this machine. Safe at any time."""
    from shoal import jobs
    from shoal.cli.checks import leftovers
    from shoal.state import Store

    did = jobs.sweep()
    left = leftovers(Store())
    if as_json:
        print_json({"did": did, "left": left})
    else:
        show(*did or ["nothing to sweep"])
        if left:
            show(f"still there: {', '.join(left)}")
    if left:
        raise typer.Exit(ExitCode.FAILED)


def _pool(source: str | None) -> ComputePool:
    from shoal.pool.api import ComputePool
    from shoal.pool.holder import cli_holder

    return ComputePool(source, holder=cli_holder())


def _show(status: PoolStatus, as_json: bool) -> None:
    if as_json:
        print_json(status.to_dict())
        return
    last = status.last_operation
    show(
        fields(
            [
                ("pool", status.name),
                ("state", status.state),
                ("nodes", describe_counts(status)),
                ("limits", f"{status.min_nodes} to {status.max_nodes} nodes"),
                ("note", status.reason),
                (
                    "last operation",
                    last and f"{last.kind} to {last.size} by {last.holder}, {when(last.created_at)}: {last.state}",
                ),
                ("host", status.host),
                ("made from", status.uri),
            ]
        )
    )
    everyone = [*status.active, *status.pending, *status.failed, *status.leaving]
    if everyone:
        rows = [(n.name, _role(n), n.state, n.cpus, n.gpus, "yes" if n.busy else "no", n.error) for n in everyone]
        show("", table(("NODE", "ROLE", "STATE", "CPUS", "GPUS", "BUSY", "ERROR"), rows))
    if status.leases:
        leased = [(lease.holder, lease.size, when(lease.expires_at)) for lease in status.leases]
        show("", table(("LEASE OF", "NODES", "UNTIL"), leased))


def _role(node: NodeStatus) -> str:
    return "head" if node.is_head else "worker"
