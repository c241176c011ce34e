"""Compare the rows of a training with the profile of the rows on which the champion was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.data.dataset_spec import DatasetSpec
from shoal.data.filters import check_present
from shoal.data.numpy_columns import category_type
from shoal.data.parquet.schema import is_time
from shoal.data.parquet.source import ParquetSource
from shoal.data.profile import has_numbers, profile_of, sample_rows, stability_index
from shoal.errors import DataError
from shoal.jobs.mlflow_run import Run, answering, missing_ignored
from shoal.jobs.register import Register
from shoal.models.contest import champion_of
from shoal.models.training_record import load_record

PROFILE_TAG = "shoal.profile"
"""Name of the tag with the URI of the profile of a registered version's training rows."""

DRIFT_TAG = "shoal.drift"
"""Name of the tag with the columns that differ most from the champion's training rows, and their PSI, as JSON."""

_METRIC = "drift-psi"
_FOLDER = "shoal/profile"
_SHOWN = 10


@dataclass(frozen=True)
class TrainingProfile:
    """Profile of the rows of a training, and its comparison with that of the champion.

    Attributes:
        columns: Profile of each column.
        champion: Number of the champion's version; None if nothing was compared.
        drift: The population stability index (PSI) of the columns that differ most, at most ten, the largest first.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    champion: str | None = None
    drift: Mapping[str, float] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """Return the largest drift in words; empty if nothing was compared."""
        for name, value in self.drift.items():
            return f'largest drift from the training rows of version {self.champion}: PSI {value:.3g} of "{name}"'
        return ""

    def store(self, run: Run) -> dict[str, str]:
        """Store the profile and the largest drift in the MLflow run, and return tags for the registered version."""
        if not self.columns:
            return {}
        tags = {PROFILE_TAG: run.log_record(_FOLDER, json.dumps({"columns": self.columns}))}
        if self.drift:
            run.log_values({_METRIC: max(self.drift.values())})
            tags[DRIFT_TAG] = json.dumps({"champion": self.champion, "psi": self.drift})
        return tags


def profiled(
    run: Run,
    register: Register,
    dataset: DatasetSpec,
    source: ParquetSource,
    columns: Iterable[str],
    categories: Collection[str] = (),
) -> TrainingProfile:
    """Make the profile of the rows of a training, and compare it with that of the champion.

    Args:
        run: MLflow run of the training.
        register: Options with which the model is registered.
        dataset: Description of the training rows, which may say how much drift is expected.
        source: The training rows.
        columns: Input columns and label. Only those of numbers, texts, booleans, dates and timestamps have a profile.
        categories: Columns of integers whose values are categories.

    Raises:
        DataError: A column differs more from the champion's training rows than is expected.
        RegistryError: MLflow cannot be reached.
    """
    types = {name: source.schema().field(name).type for name in columns}
    has_profile = has_numbers, is_time, category_type
    names = [name for name, type_ in types.items() if any(has(type_) for has in has_profile)]
    expected = dataset.expect.drift if dataset.expect else None
    for name in expected.columns if expected else ():
        check_present(dataset.origin[0], name, names)
    if not names:
        return TrainingProfile()
    sample = sample_rows(source, names)
    found = {name: profile_of(sample.column(name), is_category=name in categories) for name in names}
    version, theirs = _of_champion(run, register)
    if version is None:
        return TrainingProfile(found)
    indices = {name: stability_index(theirs[name], sample.column(name)) for name in names if name in theirs}
    known = ((name, index) for name, index in indices.items() if index is not None)
    drift = dict(sorted(known, key=lambda each: -each[1]))
    if others := names - drift.keys():
        unknown = f"no drift is known of {', '.join(sorted(others))}: version {version} has other columns or types"
        if expected and others.intersection(expected.columns):
            raise DataError(f"{unknown}. Train once without these columns in expect.drift.columns")
        print(unknown)
    limit = expected.max if expected else math.inf
    counted = (expected and expected.columns) or names
    if large := [f'"{name}" {drift[name]:.3g}' for name in drift if name in counted and drift[name] > limit]:
        raise DataError(
            f"the rows of {dataset.origin[0]} differ too much from those on which {register.alias} version {version} "
            f"of {register.model} was trained: the PSI is {', '.join(large)}, at most {limit:g} expected. Check "
            "the rows, or raise expect.drift.max"
        )
    profile = TrainingProfile(found, version, dict([*drift.items()][:_SHOWN]))
    print(f"drift (PSI): {', '.join(f'{name} {value:.3g}' for name, value in profile.drift.items())}", flush=True)
    return profile


def _of_champion(run: Run, register: Register) -> tuple[str | None, Mapping[str, Any]]:
    """Return the number of the champion's version and the profiles of its columns; None if it has no profile."""
    with answering(run.uri), missing_ignored():
        if (version := champion_of(run.client, register)) is not None:
            name = f"{register.alias} version {version} of {register.model}"
            uri = run.client.get_model_version(register.model, version.number).tags.get(PROFILE_TAG)
            if uri is None:
                print(f"{name} has no profile, so no drift is measured", flush=True)
            elif found := load_record(run, uri, f"the distributions in the training rows of {name}"):
                return version.number, found["columns"]
    return None, {}
