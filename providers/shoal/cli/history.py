"""Command `shoal history`: show who changed which pool, job or model, when, and with which outcome."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shoal.cli.output import Json, duration, require_pool_if, show_list, when


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
    require_pool_if(not found, pool_name)
    rows = [(when(one.at), one.actor, one.kind.value, one.pool, one.subject, one.detail, one.outcome) for one in found]
    columns = ("TIME", "ACTOR", "ACTION", "POOL", "SUBJECT", "DETAIL", "OUTCOME")
    show_list({"history": found}, columns, rows, "no actions found", as_json=as_json)
