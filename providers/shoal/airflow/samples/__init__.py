"""Provide the sample DAGs, and copy them to a folder of DAGs for the command `shoal init airflow FOLDER`.

The samples are the files in the top-level folder ``dags`` of the source code. The wheel contains the samples beside
this file.
"""

from __future__ import annotations

from pathlib import Path

from shoal.errors import InvalidArgumentError

SAMPLES = (
    "many_models.py",
    "model_alerts.py",
    "pool_janitor.py",
    "scheduled_retraining.py",
    "score_on_promotion.py",
    "train_networks.py",
)
"""Names of the files."""


def write_samples(folder: Path) -> list[Path]:
    """Copy the sample DAGs to a folder. A file that already has the same content is left as it is.

    :param folder: Folder of DAGs, which is created if it does not exist.
    :returns: Paths of the files that were written.
    :raises InvalidArgumentError: The folder cannot be written, or contains a different file of the same name. No file
        was written.
    """
    texts = {folder / name: (_source() / name).read_text() for name in SAMPLES}
    try:
        missing = {path: text for path, text in texts.items() if not path.exists()}
        other = [str(path) for path in texts.keys() - missing.keys() if path.read_text() != texts[path]]
        if other:
            raise InvalidArgumentError(
                f"{' and '.join(sorted(other))} would be overwritten: rename or remove the existing files, or give "
                "another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in missing.items():
            path.write_text(text)
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError(f"{folder} cannot be used as a folder of DAGs: {error}") from None
    return list(missing)


def _source() -> Path:
    """Return the folder of the sample DAGs: this module's folder if shoal was installed from a wheel, otherwise the
    folder ``dags`` of the repository."""
    installed = Path(__file__).parent
    return installed if (installed / SAMPLES[0]).exists() else Path(__file__).parents[4] / "dags"
