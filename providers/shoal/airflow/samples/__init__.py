"""Provide the sample DAGs, for the command `shoal init airflow FOLDER`.

The samples are the files in the top-level folder ``dags`` of the source code. The wheel contains them beside this file.
"""

from __future__ import annotations

from pathlib import Path

from shoal.new_files import read_samples

_FILES = (
    "many_models.py",
    "model_alerts.py",
    "pool_janitor.py",
    "scheduled_retraining.py",
    "score_on_promotion.py",
    "train_networks.py",
)


def samples(folder: Path) -> dict[str, str]:
    """Return the texts of the files by name."""
    return read_samples(Path(__file__).parent, "dags", _FILES)
