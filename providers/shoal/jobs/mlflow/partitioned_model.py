"""Log the models of all partitions to MLflow as one model, which takes the champion's model for a failed partition."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.errors import DataError
from shoal.jobs.files import storage
from shoal.jobs.mlflow import job_run
from shoal.jobs.mlflow.job_run import MARK
from shoal.jobs.partitions import pyfunc_loader
from shoal.jobs.partitions.keys import key_text, keys_in, type_of_columns
from shoal.jobs.partitions.messages import ModelBytes, Outcome
from shoal.jobs.partitions.pyfunc_loader import OPTIONS, PartitionedModel
from shoal.jobs.partitions.result_files import MANIFEST, ResultWriter, complete_files, manifest_of
from shoal.jobs.partitions.results import PartitionResults
from shoal.training.boosting.library import library_of

if TYPE_CHECKING:
    import pyarrow as pa

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
    import mlflow

    signature = signature_of(schema, by, input_cols)
    with tempfile.TemporaryDirectory(prefix="shoal-model-") as temporary:
        folder = Path(temporary, "partitions")
        _copy(results, folder)
        (folder / OPTIONS).write_text(json.dumps({"by": list(by), "input_cols": list(input_cols)}))
        kept = 0 if champion is None else _keep(folder, results, champion)
        info = mlflow.pyfunc.log_model(
            name="model",
            loader_module=pyfunc_loader.__name__,
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
    import mlflow

    # Without a tracking URI, MLflow would read a database in the working folder, and not that in which jobs register.
    with job_run.tracking_at(job_run.uri_of()):
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    flavour = mlflow.models.Model.load(str(folder)).flavors.get("python_function", {})
    if flavour.get("loader_module") != pyfunc_loader.__name__:
        return None
    return PartitionedModel(str(folder / flavour["data"]))


def _requirements(results: PartitionResults) -> list[str]:
    import importlib.metadata

    import shoal

    used = sorted({each.kind for each in results if each.status == "succeeded"} & BOOSTING_LIBRARIES.keys())
    named = [f"{name}=={library_of(name).version()}" for name in used]
    return [f"shoal=={shoal.__version__}", f"pandas=={importlib.metadata.version('pandas')}", *named]


def signature_of(schema: pa.Schema, by: Sequence[str], input_cols: Sequence[str]) -> Any:
    """Return the signature of the model: the columns of the keys and the features, and one number as output.

    Most columns may have any type, because MLflow refuses integers for ``double`` and nulls for ``long`` and
    ``boolean``, and makes True of a null. The model itself refuses keys of another kind.

    Raises:
        DataError: The model cannot take a column.
    """
    import pyarrow as pa
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    type_of_columns(schema, by)
    for name in input_cols:
        _check_feature(name, schema.field(name).type)
    columns = dict.fromkeys((*by, *input_cols))
    # MLflow reads timestamps in JSON only for columns of this type, to which it converts no zone.
    types = {
        name: "datetime" for name in columns if pa.types.is_timestamp(type_ := schema.field(name).type) and not type_.tz
    }
    specs = [ColSpec(types.get(name, AnyType()), name) for name in columns]
    return ModelSignature(Schema(specs), Schema([ColSpec("double")]))


def _check_feature(name: str, type_: pa.DataType) -> None:
    import pyarrow as pa

    kind = pa.types
    value = type_.value_type if kind.is_dictionary(type_) else type_
    allowed = (
        kind.is_boolean,
        kind.is_integer,
        kind.is_floating,
        kind.is_string,
        kind.is_large_string,
        kind.is_timestamp,
    )
    if not any(check(value) for check in allowed):
        raise DataError(
            f'the column "{name}" is of type {type_}, which a model in MLflow cannot take: convert it to a number, a '
            "text or a timestamp, or remove register"
        )
