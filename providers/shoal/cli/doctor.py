"""Command `shoal doctor`: check this machine, and print the results."""

from __future__ import annotations

import typer
from rich.text import Text

from shoal.cli.exits import ExitCode
from shoal.cli.output import Json, print_json, show

_SIGNS = {"ok": ("ok    ", "green"), "note": ("note  ", "yellow"), "broken": ("BROKEN", "bold red")}


def doctor(as_json: Json = False) -> None:
    """Check this machine, and say how to fix each problem. Exit code 1 means that local pools cannot work."""
    from shoal.cli.doctor_checks import all_checks

    checks = list(all_checks())
    broken = [check for check in checks if check.status == "broken"]
    if as_json:
        print_json({"ok": not broken, "checks": checks})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            show(Text.assemble(_SIGNS[check.status], "  ", check.name.ljust(width), "  ", check.found))
            if check.advice:
                show(Text(" " * (8 + width + 2) + "-> " + check.advice, style="dim"))
        names = ", ".join(check.name for check in broken)
        show("", f"local pools cannot work, because of: {names}" if broken else "local pools can work on this machine")
    if broken:
        raise typer.Exit(ExitCode.FAILED)
