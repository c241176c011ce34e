"""Provide the sample DAGs, for the command `shoal init airflow FOLDER`.

The samples are the files in the top-level folder ``dags`` of the source code. The wheel contains them beside this file.
"""

from __future__ import annotations

from pathlib import Path

from shoal.new_files import read_samples


def samples(folder: Path) -> dict[str, str]:
    """Return the texts of the files by name."""
    return read_samples(__file__, "dags")
