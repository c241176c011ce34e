"""Stores of two teams on one PostgreSQL server, as the guide makes them: a database, and a schema of another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import make_url

from tests.support import ROOT
from tests.support.postgres import PASSWORD, Postgres

GUIDE = (ROOT / "docs" / "operations.md").read_text()
_URL = re.compile(r"SHOAL_STATE_URL='?(postgresql\+psycopg://(fraud|ads)@[^'\s]+)")


def commands(kind: str) -> list[str]:
    """The guide's SQL commands for a store of a kind: "database" or "schema"."""
    found = re.search(rf"<!-- sql of a {kind} -->\n```sql\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return [each.strip() for each in found[1].split(";") if each.strip()]


def guides_url(server: Postgres, team: str) -> str:
    """The guide's URL of a team's store, at this server."""
    [url] = {url for url, found in _URL.findall(GUIDE) if found == team}
    at = make_url(url).set(host="127.0.0.1", port=server.port, password=PASSWORD)
    return at.render_as_string(hide_password=False)


@contextmanager
def team_stores(server: Postgres) -> Iterator[dict[str, str]]:
    """The URLs of the stores of the teams "fraud" (a database) and "ads" (a schema)."""
    try:
        server.run("CREATE DATABASE shoal")
        for database, kind in (("postgres", "database"), ("shoal", "schema")):
            for command in commands(kind):
                server.run(command, database)
        for team in ("fraud", "ads"):
            server.run(f"ALTER ROLE {team} PASSWORD '{PASSWORD}'")
        yield {team: guides_url(server, team) for team in ("fraud", "ads")}
    finally:
        for statement in ("DATABASE {} fraud", "DATABASE {} shoal", "ROLE {} fraud", "ROLE {} ads"):
            force = " WITH (FORCE)" if "DATABASE" in statement else ""
            server.run(f"DROP {statement.format('IF EXISTS')}{force}")
