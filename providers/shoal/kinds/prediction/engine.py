"""Predict a dataset with a gang (workers that start together) on the Ray cluster to which this process is connected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shoal.data.connector import DataConnector
from shoal.data.output_tables import kept_columns
from shoal.errors import DataError, JobError
from shoal.kinds.partitions.predictions import report_unknown
from shoal.kinds.prediction import worker
from shoal.kinds.prediction.output_files import Output, predictions_key
from shoal.kinds.prediction.spec import PredictJobSpec, PredictResult
from shoal.kinds.prediction.worker import plan_files
from shoal.lazy_imports import mlflow
from shoal.models import loading
from shoal.models.registry import VersionId
from shoal.training import cluster, locations
from shoal.training.gang.gang import shared_gang
from shoal.training.locations import Claim
from shoal.training.reporting import OnProgress, Progress, ProgressDisplay, say
from shoal.training.run_config import Restarts
from shoal.training.timeouts import FIRST_PROGRESS_LINE_S
from shoal.training.tracking import MODEL_VERSION


def run(
    spec: PredictJobSpec,
    *,
    claim: Claim,
    env: Mapping[str, str] | None = None,
    may_publish: Callable[[], bool] = lambda: True,
    has_ended: Callable[[Claim], bool] = lambda claim: False,
    on_progress: OnProgress | None = None,
) -> PredictResult:
    """Predict every row of a dataset, and publish the predictions when all predictions are written.

    Each worker reads, predicts and writes a contiguous share of the rows. If a worker is lost, the next group of
    workers keeps the files that are complete. If the output already has the predictions of the same rows by the same
    model, nothing is done.

    Raises:
        InvalidArgumentError: This process is not connected to Ray, or the output cannot be written or replaced.
        JobError: The model does not exist, or cannot be loaded.
        DataError: The dataset has no rows, or lacks a column that the model needs.
        CapacityError: The active nodes are too small for the workers, or had no free room in time.
        WorkerLostError: Workers or nodes were lost more often than `max_restarts` allows.
    """
    restarts = Restarts(spec.run_config)
    cluster.require_connection()
    connector = DataConnector.from_spec(spec.dataset)
    if not (rows := connector.num_rows()):
        raise DataError("the dataset has no rows to predict: check its paths and its filters")
    uri = pinned(spec.model)
    output = Output(spec.output_path, claim, may_publish, has_ended)
    key = predictions_key(spec, identity(uri), connector.digest())
    output.restore()
    if output.finished(key, overwrite=spec.overwrite):
        say(f"{spec.output_path} already has the predictions of {uri} for these rows")
        return PredictResult(spec.output_path, rows, uri, 0, 0, restarts.seconds)
    keep = kept_columns(spec.keep_cols, spec.prediction_col, connector.source)
    loading.load(uri, spec.input_cols, category_codes=spec.category_codes).check(connector.source)
    locations.try_out(spec.output_path.rpartition("/")[0] or "/", "output_path")
    output.prepare()
    try:
        work = worker.Assignment(spec, uri, connector.source, keep, output.staging)
        peaks, names = _predict_all(work, rows, restarts, env or {}, on_progress)
        output.publish(names, key=key, model=uri, rows=rows, overwrite=spec.overwrite)
    finally:
        output.discard()
    return PredictResult(spec.output_path, rows, uri, len(peaks), restarts.count, restarts.seconds, tuple(peaks))


def _predict_all(
    work: worker.Assignment, rows: int, restarts: Restarts, env: Mapping[str, str], on_progress: OnProgress | None
) -> tuple[list[int], list[str]]:
    """Predict all rows, and report those of keys without a model; return each rank's peak memory, and the output files'
    names."""
    size = work.spec.demand().resolved()
    # The rows are divided into files only once, and not again at a restart. Otherwise a restart could divide them
    # differently, and the files that are already complete would be useless.
    parts = plan_files(work.source.row_groups(), min(size.num_workers, rows))
    shape = replace(size, num_workers=len(parts))
    unknown: Counter[str] = Counter()

    def attempt() -> list[int]:
        done = 0
        unknown.clear()  # the workers count them again, also in the files that are complete

        def report(_rank: int, note: dict[str, Any]) -> None:
            nonlocal done
            done += note["rows"]
            unknown.update(note.get("unknown", {}))
            display.show(Progress(done, rows, "rows"))

        with (
            shared_gang(shape, timeout=restarts.wait_s, env=env) as gang,
            ProgressDisplay(first_line_s=FIRST_PROGRESS_LINE_S, on_progress=on_progress) as display,
        ):
            tasks = [(work, files) for files in parts]
            peaks: list[int] = gang.run(worker.predict, tasks, timeout=restarts.timeout, on_note=report)
        return peaks

    peaks = restarts.run(attempt, checkpoint=lambda: "the files that are complete")
    report_unknown(unknown, rows)
    return peaks, [file.name for files in parts for file in files]


_ALIAS = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")


def identity(uri: str) -> str:
    """Return a text that identifies a model: the URI of a version, with its time and run, or of a run, or the path and
    the id of a model folder.

    Raises:
        JobError: There is no model at this URI.
    """
    if (named := MODEL_VERSION.fullmatch(uri)) is not None:
        return f"{uri} {VersionId.read(mlflow.MlflowClient(), named['name'], named['version'])!r}"
    if uri.startswith(("models:/", "runs:/")):
        return uri
    try:
        return f"{uri} {mlflow.models.get_model_info(uri).model_uuid}"
    except (mlflow.MlflowException, OSError) as error:
        raise JobError(
            f"there is no MLflow model at {uri} ({error}): name the folder or URI of a model that MLflow has saved"
        ) from error


def pinned(uri: str) -> str:
    """Replace the alias in a model's URI with the version number, so that all workers load the same model.

    Any other URI is returned unchanged.

    Raises:
        JobError: There is no such model or alias.
    """
    if (named := _ALIAS.fullmatch(uri)) is None:
        return uri
    try:
        version = mlflow.MlflowClient().get_model_version_by_alias(named["name"], named["alias"]).version
    except mlflow.MlflowException as error:
        raise JobError(
            f"the model {uri} does not exist in the registry ({error.message}): `shoal models list` shows the models "
            "that shoal has registered"
        ) from error
    return f"models:/{named['name']}/{version}"
