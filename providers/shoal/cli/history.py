"""Command `shoal history`: show who changed which pool, job or model, when, and with which outcome."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shoal.cli.output import Json, duration, print_json, show, table, when


def history(
    pool_name: Annotated[
        str | None, typer.Option("--pool", metavar="NAME", help="List only actions on this pool and its jobs.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="List only actions of this kind, such as scaled or cancelled.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Age of the oldest line: hours, days or weeks, such as 7d.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Greatest number of lines.")] = 100,
    as_json: Json = False,
) -> None:
    """List actions on pools, jobs and models, the newest first: who acted, when, and with which outcome."""
    from shoal.history import read

    oldest = None if since is None else time.time() - duration(since).total_seconds()
    found = read(pool=pool_name, kind=kind, since=oldest, limit=limit)
    if pool_name and not found:
        # The pool's name may be wrong. The name is checked only if no action was found, because a deleted pool may
        # still have actions.
        from shoal.pool.selection import which_pool
        from shoal.state import Store

        which_pool(Store(), pool_name)
    if as_json:
        print_json({"history": found})
    elif not found:
        show("no actions found")
    else:
        rows = [
            (when(one.at), one.actor, one.kind.value, one.pool, one.subject, one.detail, one.outcome) for one in found
        ]
        show(table(("TIME", "ACTOR", "ACTION", "POOL", "SUBJECT", "DETAIL", "OUTCOME"), rows))
