"""Command ``shoal check-dags``. The command line finds this command through the entry point ``shoal.commands``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.airflow.testing.check import IMPORT_BUDGET_S, DagReport, Rule, check_dags

_FORMATS: dict[str, Callable[[DagReport], str]] = {
    "text": str,
    "json": DagReport.to_json,
    "github": DagReport.annotations,
}

app = typer.Typer(add_completion=False)


@app.command(epilog="**Rules**: " + ", ".join(Rule))
def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="DAG files, or folders with DAG files.")],
    form: Annotated[
        Literal["text", "json", "github"],
        typer.Option("--format", help="How to print the problems; github: as annotations of GitHub Actions."),
    ] = "text",
    import_budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Seconds that loading a file may take.")
    ] = IMPORT_BUDGET_S,
    always_up: Annotated[
        list[str] | None,
        typer.Option(metavar="POOL", help="Pool, or connection of a pool, that is always up. May be repeated."),
    ] = None,
    connection: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Connection that exists where the DAGs run. May be repeated.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Rule that is not checked. May be repeated.")
    ] = None,
) -> None:
    """Check Airflow DAG files before they are deployed. Exit code 1 means that there are problems."""
    report = check_dags(
        *paths,
        import_budget_s=import_budget,
        always_up=always_up or (),
        connections=connection or (),
        ignore=ignore or (),
    )
    if text := _FORMATS[form](report):  # without problems, there are no annotations
        typer.echo(text)
    if report.findings:
        raise typer.Exit(1)
