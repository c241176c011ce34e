"""Log the models of all partitions to MLflow as one model, which predicts each row with the model of its partition.

MLflow loads the model by the name of this module. A partition that has failed keeps the champion's model.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError
from shoal.jobs import mlflow_run
from shoal.jobs.files import storage
from shoal.jobs.mlflow_run import MARK, model_signature
from shoal.kinds.partitions.keys import (
    Key,
    check_same_kinds,
    encoded,
    key_text,
    key_type,
    keys_in,
    shown_key,
    type_of_columns,
)
from shoal.kinds.partitions.partition_messages import ModelBytes, Outcome
from shoal.kinds.partitions.partition_results import PartitionResult, PartitionResults
from shoal.kinds.partitions.predictions import predicted_by
from shoal.kinds.partitions.result_files import MANIFEST, ResultWriter, complete_files, manifest_of
from shoal.lazy_imports import mlflow, np, pa, pd
from shoal.training.boosting.library import library_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


OPTIONS = "model.json"
"""Name of the file with the columns of the keys and the features."""

_MOST_MODELS = 1_000
_MOST_BYTES = 256 * 2**20
"""Greatest number of models that are kept, and greatest sum of their sizes as files."""


def _load_pyfunc(path: str) -> PartitionedModel:
    """Load the model from its folder; MLflow calls this function by its name."""
    return PartitionedModel(path)


class PartitionedModel:
    """Model that predicts each row with the model of its partition. A row whose key has no model is predicted as NaN.

    MLflow calls :meth:`predict`. Jobs use the other methods, which read the keys from Arrow tables, in which a null
    stays a null.

    Args:
        folder: Local folder of the model.
    """

    classes: tuple[Any, ...] | None = None
    gives_classes: bool | None = None
    code_cols: tuple[str, ...] = ()

    def __init__(self, folder: str) -> None:
        options = json.loads(Path(folder, OPTIONS).read_text())
        self.by: tuple[str, ...] = tuple(options["by"])
        self.input_cols: tuple[str, ...] = tuple(options["input_cols"])
        self.results = PartitionResults(str(Path(folder, MANIFEST)))
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def get_raw_model(self) -> PartitionedModel:
        """Return this model; MLflow's ``PyFuncModel`` has a method of this name."""
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a table must contain: those of the keys, and the features."""
        return tuple(dict.fromkeys((*self.by, *self.input_cols)))

    def check(self, source: ParquetSource) -> None:
        """Check that a dataset has the columns of the model, and keys of the kind that the models have.

        Raises:
            DataError: A column is missing, or the keys are of another kind.
        """
        self._check_columns(source.schema().names)
        check_same_kinds(key_type(source, self.by), self.results.key_type, self.by)

    def predict(self, model_input: pd.DataFrame, params: Any = None) -> np.ndarray:
        """Return the predictions of rows, ``[rows]`` or ``[rows, outputs]``."""
        self._check_columns(map(str, model_input.columns))
        rows = model_input.reset_index(drop=True)
        keys = {}
        for name in self.by:
            try:
                keys[name] = pa.array(rows[name], from_pandas=True)
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise DataError(f'the column "{name}" has values that cannot be keys: {error}') from error
        # MLflow makes objects of nullable numbers, which the boosting libraries refuse.
        for name in [name for name in self.input_cols if rows[name].dtype == object]:
            with contextlib.suppress(pa.ArrowException, TypeError, ValueError):
                rows[name] = pa.array(rows[name], from_pandas=True).to_pandas()
        return self._predicted(pa.table(keys), rows)

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the predictions of a table's rows, ``[rows]`` or ``[rows, outputs]``."""
        return self._predicted(table, table.select(list(self.columns)).to_pandas())

    def unknown(self, table: pa.Table) -> tuple[NDArray[np.bool_], dict[str, int]]:
        """Return which rows of a table have a key without a model, and the number of rows of each such key."""
        codes, keys = self._encoded(table)
        rows = np.bincount(codes, minlength=len(keys))
        lacks = np.array([not self.results.predicts(key) for key in keys], bool)
        return lacks[codes], {shown_key(keys[code]): int(rows[code]) for code in np.flatnonzero(lacks).tolist()}

    def _encoded(self, table: pa.Table) -> tuple[np.ndarray, list[Key]]:
        """Return the index of each row's key and the different keys, which are of the kind that the models have."""
        found, wanted = type_of_columns(table.schema, self.by), self.results.key_type
        codes, keys = encoded(table, self.by)
        check_same_kinds(found, wanted, self.by, keys)
        return codes, keys

    def _check_columns(self, names: Iterable[str]) -> None:
        if missing := sorted(set(self.columns) - set(names)):
            raise DataError(
                f"the rows lack columns that the model needs: {', '.join(missing)}. The keys are in "
                f"{', '.join(self.by)}, and select the model of each row"
            )

    def _predicted(self, table: pa.Table, rows: pd.DataFrame) -> np.ndarray:
        """Predict rows, of which `table` has the keys."""
        codes, keys = self._encoded(table)
        found = {code: self.results[key] for code, key in enumerate(keys) if self.results.predicts(key)}
        predicted: np.ndarray | None = None
        # In the order of the files, so that each row group is read once.
        for code in sorted(found, key=lambda code: found[code].place):
            positions = np.flatnonzero(codes == code)
            values = self._predicted_by(found[code], rows.iloc[positions])
            if predicted is None:
                predicted = np.full((len(rows), *values.shape[1:]), np.nan)
            if values.shape[1:] != predicted.shape[1:]:
                raise DataError(
                    f"the model of key {shown_key(found[code].key)} returns {values.shape[1:]} values per row, but "
                    f"another one {predicted.shape[1:]}: train models with equal outputs"
                )
            predicted[positions] = values
        if predicted is None:
            # Rows without a model have predictions of the same shape.
            first = next((each for each in self.results if each.status == "succeeded"), None)
            shape = () if first is None or not len(rows) else self._predicted_by(first, rows.head(1)).shape[1:]
            predicted = np.full((len(rows), *shape), np.nan)
        return predicted

    def _predicted_by(self, found: PartitionResult, rows: pd.DataFrame) -> np.ndarray:
        values = predicted_by(self._model(found), rows, self.input_cols)
        try:
            return np.asarray(values, np.float64)
        except ValueError as error:
            raise DataError(
                f"the model of key {shown_key(found.key)} predicts values that are no numbers: {error}"
            ) from error

    def _model(self, found: PartitionResult) -> Any:
        text = found.text
        if text in self._kept:
            self._kept.move_to_end(text)
            return self._kept[text][0]
        model = found.value
        self._kept[text] = model, found.size_bytes
        while len(self._kept) > _MOST_MODELS or (
            len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > _MOST_BYTES
        ):
            self._kept.popitem(last=False)
        return model


KEPT_FILE = 10**5 - 1
"""Number of the result file with the models of the champion."""


def log(
    results: PartitionResults,
    *,
    by: Sequence[str],
    input_cols: Sequence[str],
    schema: pa.Schema,
    champion: str | None = None,
) -> tuple[str, int]:
    """Log the models to the active run, and return the URI of the model and the number of models of the champion.

    Args:
        results: The models.
        by: Columns of the keys.
        input_cols: Feature columns.
        schema: Schema of the training data.
        champion: URI of the version from which the models of failed partitions are taken; None: they have no model.

    Raises:
        DataError: MLflow has no type for a column.
    """
    signature = signature_of(schema, by, input_cols)
    with tempfile.TemporaryDirectory(prefix="shoal-model-") as temporary:
        folder = Path(temporary, "partitions")
        _copy(results, folder)
        (folder / OPTIONS).write_text(json.dumps({"by": list(by), "input_cols": list(input_cols)}))
        kept = 0 if champion is None else _keep(folder, results, champion)
        info = mlflow.pyfunc.log_model(
            name="model",
            loader_module=__name__,
            data_path=str(folder),
            signature=signature,
            # Otherwise MLflow would run the model to find out which packages it needs.
            pip_requirements=_requirements(results),
            metadata={MARK: {"partitions": len(results), "kept": kept}},
        )
    return str(info.model_uri), kept


def _copy(results: PartitionResults, folder: Path) -> None:
    """Copy the manifest and the result files into a local folder."""
    (folder / "results").mkdir(parents=True)
    (folder / MANIFEST).write_bytes(storage.read(results.manifest))
    source = f"{results.manifest.rpartition('/')[0]}/results"
    for name in sorted({each.place[0] for each in results}):
        target = folder / "results" / name
        if "://" in source:
            target.write_bytes(storage.read(f"{source}/{name}"))
        else:
            shutil.copyfile(f"{source}/{name}", target)


def _keep(folder: Path, results: PartitionResults, champion: str) -> int:
    """Add the champion's models for the failed partitions, and return their number."""
    earlier, options = model_of(champion), json.loads((folder / OPTIONS).read_text())
    # The models of other columns are for other rows, even if the values of the keys are the same.
    if earlier is None or [list(earlier.by), list(earlier.input_cols)] != [options["by"], options["input_cols"]]:
        return 0
    failed = {each.text: each for each in results.failed}
    found = [
        (failed[each.text], each) for each in earlier.results if each.text in failed and each.status == "succeeded"
    ]
    if not found:
        return 0
    tables = complete_files(str(folder / "results"))
    key_type = next(iter(tables.values())).schema.field("key").type
    writer = ResultWriter(str(folder / "results"), KEPT_FILE, key_type)
    writer.expect(len(found))
    for mine, theirs in found:
        error = f"this is the model of {champion}, because the training failed: {mine.error}"
        value = ModelBytes(theirs.kind, theirs.content())
        writer.add(Outcome(mine.key, "succeeded", mine.attempts, mine.rows, 0.0, {}, error, "", value))
    writer.close()
    replaced = {mine.text for mine, _ in found}
    tables = complete_files(str(folder / "results"))
    rows = [
        table
        if bucket == KEPT_FILE
        else table.filter([key_text(key) not in replaced for key in keys_in(table.column("key"))])
        for bucket, table in sorted(tables.items())
    ]
    (folder / MANIFEST).write_bytes(manifest_of(rows))
    return len(found)


def model_of(model_uri: str) -> PartitionedModel | None:
    """Load a model of MLflow with the models of partitions; None if it is no model of partitions.

    The files are copied to a temporary folder of MLflow, or read in place if they are on this machine.
    """
    # Without a tracking URI, MLflow would read a database in the working folder, and not that in which jobs register.
    with mlflow_run.tracking_at(mlflow_run.uri_of()):
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    flavour = mlflow.models.Model.load(str(folder)).flavors.get("python_function", {})
    if flavour.get("loader_module") != __name__:
        return None
    return PartitionedModel(str(folder / flavour["data"]))


def _requirements(results: PartitionResults) -> list[str]:
    import importlib.metadata

    import shoal

    used = sorted({each.kind for each in results if each.status == "succeeded"} & BOOSTING_LIBRARIES.keys())
    named = [library_of(name).requirement() for name in used]
    return [f"shoal=={shoal.__version__}", f"pandas=={importlib.metadata.version('pandas')}", *named]


def signature_of(schema: pa.Schema, by: Sequence[str], input_cols: Sequence[str]) -> Any:
    """Return the signature of the model: the columns of the keys and the features, and one number as output.

    The model itself refuses keys of another kind.

    Raises:
        DataError: The model cannot take a column.
    """
    from mlflow.types import ColSpec, Schema

    type_of_columns(schema, by)
    for name in input_cols:
        _check_feature(name, schema.field(name).type)
    return model_signature(schema, dict.fromkeys((*by, *input_cols)), Schema([ColSpec("double")]))


def _check_feature(name: str, type_: pa.DataType) -> None:
    kind = pa.types
    value = type_.value_type if kind.is_dictionary(type_) else type_
    is_text = kind.is_string(value) or kind.is_large_string(value)
    is_number = kind.is_boolean(value) or kind.is_integer(value) or kind.is_floating(value)
    if not (is_text or is_number or kind.is_timestamp(value)):
        raise DataError(
            f'the column "{name}" is of type {type_}, which a model in MLflow cannot take: convert it to a number, a '
            "text or a timestamp, or remove register"
        )
