"""Command `shoal init`: write sample files for a workflow engine."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import Json, print_json, show
from shoal.errors import InvalidArgumentError
from shoal.new_files import write_samples

_GROUP = "shoal.init"
"""Group of entry points. Each entry point is a function that returns the texts of the samples for one workflow engine,
by name of the file, for a folder. Entry points are used because the modules of the CLI must not import the modules for
workflow engines."""


def init(
    engine: Annotated[str, typer.Argument(help="Workflow engine: airflow or prefect.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the files, for example Airflow's folder of DAGs.")],
    as_json: Json = False,
) -> None:
    """Write sample files to a folder: DAGs or flows that train, predict, warn and clean up; for Prefect, also their
    deployments.

    Files that exist are not overwritten.
    """
    known = {each.name: each for each in entry_points(group=_GROUP)}
    if engine not in known:
        raise InvalidArgumentError(f'there are no samples for "{engine}": use {" or ".join(sorted(known))}')
    samples: Callable[[Path], dict[str, str]] = known[engine].load()
    written = write_samples(folder, samples(folder))
    if as_json:
        print_json({"written": [str(path) for path in written]})
    else:
        show(*(f"wrote {path}" for path in written) if written else (f"{folder} already has these files",))
