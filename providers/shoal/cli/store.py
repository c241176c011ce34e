"""Command `shoal store policies`: print SQL by which PostgreSQL keeps teams from changing the rows of other teams."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.output import Json, print_json

app = typer.Typer(no_args_is_help=True, help="Protect the rows of teams in a PostgreSQL store.")


@app.callback()
def _group() -> None:
    """Keep `policies` a subcommand: typer runs a single command without its name."""


@app.command()
def policies(
    team: Annotated[list[str], typer.Option(metavar="TEAM", help="Name of a team. Repeat the option for each team.")],
    reconciler_role: Annotated[
        str, typer.Option(metavar="ROLE", help="Role that may change the rows of all teams, for the reconciler.")
    ] = "shoal_reconciler",
    as_json: Json = False,
) -> None:
    """Print SQL that creates a role for each team, and policies that let the role change only rows of its team.

    Run the SQL in the PostgreSQL database of the store, as the owner of the tables:
    `shoal store policies --team fraud --team ads | psql -v ON_ERROR_STOP=1 "$URL"`. Run it again after each upgrade of
    shoal.
    """
    from shoal.state import policies as sql

    text = sql.policies(team, reconciler=reconciler_role)
    if as_json:
        print_json({"roles": [reconciler_role, *map(sql.role_of, team)], "sql": text})
    else:
        typer.echo(text)
