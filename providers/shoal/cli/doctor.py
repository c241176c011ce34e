"""Command `shoal doctor`: check this machine, and print the results."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from shoal.cli.ending import ExitCode
from shoal.cli.output import Json, print_json, show
from shoal.errors import InvalidArgumentError

_SIGNS = {"ok": ("ok    ", "green"), "note": ("note  ", "yellow"), "broken": ("BROKEN", "bold red")}


def doctor(
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="Check the nodes of this ray:// or kuberay:// pool instead of this machine."),
    ] = None,
    artifact_location: Annotated[
        str | None, typer.Option(help="With --pool: URI or path to which the nodes must be able to write.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, or the nodes of a ray:// or kuberay:// pool, and print how to fix each problem. The exit code
    is 1 if local pools, or jobs on the given pool, cannot work."""
    from shoal.cli.doctor_checks import all_checks
    from shoal.pool.api import ComputePool

    if pool is None and artifact_location is not None:
        raise InvalidArgumentError(
            "--artifact-location is checked only on the nodes of a pool: add --pool, or remove --artifact-location"
        )
    checks = list(all_checks()) if pool is None else ComputePool(pool).preflight(artifact_location)
    what = "local pools" if pool is None else f"jobs on pool {pool}"
    broken = [check for check in checks if check.status == "broken"]
    if as_json:
        print_json({"ok": not broken, "checks": checks})
    else:
        width = max((len(check.name) for check in checks), default=0)
        for check in checks:
            show(Text.assemble(_SIGNS[check.status], "  ", check.name.ljust(width), "  ", check.found))
            if check.advice:
                show(Text(" " * (8 + width + 2) + "-> " + check.advice, style="dim"))
        where = " on this machine" if pool is None else ""
        names = ", ".join(check.name for check in broken)
        show("", f"{what} cannot work, because of: {names}" if broken else f"{what} can work{where}")
    if broken:
        raise typer.Exit(ExitCode.FAILED)
