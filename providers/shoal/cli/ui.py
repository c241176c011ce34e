"""Command `shoal ui`: show the page for pools, jobs and models in a browser on this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def ui(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port on 127.0.0.1. 0: any free port.")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the link; open no browser.")] = False,
) -> None:
    """Show pools, jobs and models on a web page of this machine, until Ctrl-C is pressed.

    The page listens on 127.0.0.1 only, and needs the token in the printed link.
    """
    from shoal.ui.server import serve

    serve(port, opens_browser=not no_browser)
