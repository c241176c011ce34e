"""Run an XGBoost or LightGBM job in its driver: train a model, save it, log it to MLflow, and register it there.

If the job registers the model, the model is compared with the champion, the version that has the alias. An
attempt continues with the training that an earlier attempt has saved before it failed, such as while MLflow was away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import DatasetSpec, content_of
from shoal.data.parquet.reading import take_rows
from shoal.jobs import shipped_code
from shoal.jobs.driver.attempt_context import AttemptContext, before_work, only_printed, saved_before
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.steps import patiently
from shoal.jobs.kind import KindDriver
from shoal.jobs.mlflow_run import HOLDER_TAG, Run
from shoal.jobs.results import DataResult, JobResult
from shoal.kinds.prediction.engine import pinned
from shoal.kinds.training.spec import JobSpec
from shoal.models import gate, loading, training_record
from shoal.models.contest import Outcome
from shoal.models.drift import TrainingProfile, profiled
from shoal.models.holdout import check_holdout
from shoal.models.training_record import Fingerprints, TrainingRows
from shoal.secrets.redaction import redact_value
from shoal.training.boosting.library import library_of
from shoal.training.boosting.messages import by_round
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainResult
from shoal.training.boosting.rows import check_columns, check_features
from shoal.training.host.imports import import_lean
from shoal.training.reporting import Progress, bounded, metric_name
from shoal.training.sizing.worker_memory import mib


def _input_digests(spec: JobSpec, dataset: DataConnector, rows: str, init_model: bytes | None) -> dict[str, str] | None:
    """Return a digest of each input of a training. Trainings with equal inputs train the same model.

    Args:
        spec: Spec of the job.
        dataset: Training dataset.
        rows: Digest of the training rows.
        init_model: The model from which the training continues; None if there is none.

    Returns:
        The digests by the name of the input; None if the input may change and shoal would not notice it, as with the
        user's own functions or with files whose write times are not known.
    """
    if spec.user_code is not None:
        return None
    files = [content_of(one) for one in {(one.files, one.version): one for one in spec.inputs()}.values()]
    if None in files:
        return None
    found = {
        "the spec": spec.fingerprint,
        "the training rows": [rows, [(group.index, group.rows) for group in dataset.source.row_groups()]],
        "the files of the datasets": files,
        "the library": library_of(spec.framework).version(),
        "init_model": None if init_model is None else hashlib.sha256(init_model).hexdigest(),
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}


def _saved_by_earlier_attempt(spec: JobSpec, place: AttemptContext, inputs: Mapping[str, str]) -> TrainResult | None:
    """Return the training that an earlier attempt has saved before it failed; None if this attempt has to train.

    Only a digest in the store shows that an attempt has written the files: anybody may write to a shared folder.
    """
    found = patiently(place.store, lambda: attempts.saved_before_failure(place.store, place.key))
    if found is None:
        return None
    key, digest = found
    folder = artifacts.folder(key, spec.run_config.artifact_location)
    try:
        trained, saved = artifacts.load_saved(folder, spec.framework, digest)
    except Exception as error:  # whatever the cause is, this attempt can train
        print(
            f"attempt {key.attempt} has saved a model, but it cannot be used, so the job trains again: "
            f"{type(error).__name__}: {redact_value(str(error))}",
            flush=True,
        )
        return None
    if changed := [name for name, value in inputs.items() if saved.get(name) != value]:
        print(
            f"attempt {key.attempt} has saved a model, but the job trains again, because {' and '.join(changed)} "
            "changed meanwhile",
            flush=True,
        )
        return None
    print(f"not trained again: attempt {key.attempt} has saved its model in {redact_value(folder)}, and failed later")
    place.stopwatch.worked(read_s=0.0, train_s=0.0)
    return trained


class TrainingDriver(KindDriver[JobSpec, AttemptContext]):
    """A boosting training: trains a model, saves it, logs it to MLflow, and registers it there."""

    def begin(self) -> None:
        """Prepare the imports of the library in this process and the workers, so that the training starts sooner."""
        from shoal.training.boosting.engine import import_ahead_for_workers

        spec = self.spec
        import_ahead_for_workers(spec, complete=spec.user_code is not None)
        if spec.register_as is None and spec.user_code is None:
            # `import_lean` imports the library without scikit-learn, which saves seconds.
            import_lean([spec.framework])
        else:
            # The comparison with the champion and the user's code may need scikit-learn.
            super().begin()

    def work(self, place: AttemptContext) -> tuple[JobResult, None]:
        """Train, save and log the model; see :func:`train_and_publish`."""
        return train_and_publish(self.spec, place), None


@dataclass(frozen=True)
class _Checked:
    """What is known of a training when all checks before it have passed.

    Attributes:
        dataset: Training dataset.
        data: Its rows, for the job's result.
        base: URI or path of the model from which the training continues, with a version in place of an alias; None if
            there is none.
        init_model: Content of this model.
        trained_on: Rows on which the new model is trained, or its parameters are chosen; None if those of `base` are
            not known.
        user_code: The user's functions.
        fingerprints: What decides whether the next job is skipped; None for jobs that are never skipped.
    """

    dataset: DataConnector
    data: DataResult
    base: str | None
    init_model: bytes | None
    trained_on: TrainingRows | None
    user_code: UserCode
    fingerprints: Fingerprints | None


def check_training(spec: JobSpec, place: AttemptContext, *, selected_on: DatasetSpec | None) -> None:
    """Check a training at the end of a search, as :func:`train_and_publish` does before its workers start.

    Args:
        spec: The training.
        place: The attempt.
        selected_on: Rows on which the search chooses the parameters; None: a part of the training rows.

    Raises:
        ShoalError: The training cannot succeed; the message states the cause.
    """
    _profiled(spec, place, _checked(spec, place, selected_on))


def train_and_publish(spec: JobSpec, place: AttemptContext, *, selected_on: DatasetSpec | None = None) -> JobResult:
    """Train, save and log the model of a job, and return the job's result.

    No model is trained if the job may be skipped and its rows, holdout and settings are those of the newest registered
    version.

    Args:
        spec: The training.
        place: The attempt.
        selected_on: Rows on which a search has chosen the parameters.

    Raises:
        ShoalError: The job failed; the message states the cause.
    """
    checked = _checked(spec, place, selected_on)
    folder, claim = place.checked_folder(spec.run_config.artifact_location)
    if checked.fingerprints and (skipped := _skipped(spec, place, checked.data, checked.fingerprints)):
        return skipped
    profile = _profiled(spec, place, checked)
    inputs = None
    if place.run:
        base = {} if checked.base is None else {"init_model": checked.base}
        with before_work(place.run.uri, place.environment):
            place.run.log_params({**_params(spec), **base, **checked.user_code.names()})
            place.run.log_dataset(spec.label_col, checked.data.digest, spec.dataset.origin, context="training")
        inputs = _input_digests(spec, checked.dataset, checked.data.digest, checked.init_model)
    trained = _saved_by_earlier_attempt(spec, place, inputs) if inputs else None
    if trained is None:
        trained = _train(spec, place, checked)
    else:
        rounds = by_round(trained.eval_results)
        for step, values in enumerate(rounds):
            place.metrics.log(0, values, step)
        place.on_progress(Progress(trained.rounds, spec.n_estimators, "rounds", bounded(rounds[-1]) if rounds else {}))
    place.on_trained()
    path, digest = artifacts.save(folder, claim, trained, inputs)
    if inputs:
        patiently(place.store, lambda: attempts.note_saved(place.store, place.key, digest))
    print(f"model trained on {trained.rows} rows, saved to {path}", flush=True)
    if largest := max(trained.workers, key=lambda worker: worker.peak_rss_bytes, default=None):
        figures = (largest.peak_rss_bytes, largest.predicted_bytes, largest.limit_bytes)
        print("memory of the largest worker: {}, predicted {}, limit {}".format(*map(mib, figures)), flush=True)
    uri, outcome = _published(spec, place.run, place, checked, profile, trained, path) if place.run else (path, None)
    return place.finished(
        trained,
        outcome.result() if outcome else {},
        model_path=path,
        model_digest=hashlib.sha256(trained.model).hexdigest(),
        model_uri=uri,
        metrics={**_final_metrics(trained), **(outcome.metrics if outcome else {})},
        best_iteration=trained.best_iteration,
        rows=trained.rows,
        data=checked.data,
        peak_memory_per_worker=tuple(worker.peak_rss_bytes for worker in trained.workers),
        idle_memory_per_worker=tuple(worker.idle_rss_bytes for worker in trained.workers),
        predicted_memory_per_worker=tuple(worker.predicted_bytes for worker in trained.workers),
        memory_limit_per_worker=tuple(worker.limit_bytes for worker in trained.workers),
    )


def _checked(spec: JobSpec, place: AttemptContext, selected_on: DatasetSpec | None) -> _Checked:
    """Check dataset, holdout, the model to continue from, and the form of the new model's predictions."""

    dataset = DataConnector.from_spec(spec.dataset)
    times = dataset.time_range(spec.dataset.time_col)
    # An alias is replaced by its version, which does not change during the job.
    base = None if spec.init_model is None else pinned(spec.init_model)
    content = None if base is None else loading.load_init_model(base, spec.framework)
    trained_on, held_out, all_known = TrainingRows(), "", True
    if spec.register_as:
        check_columns(spec, dataset)  # before the holdout is blamed for the same column
        trained_on = training_record.of_datasets([(dataset, times)])
        if base is not None and place.run is not None:
            earlier = training_record.rows_of(place.run, base)
            all_known = earlier is not None
            trained_on = trained_on.union(earlier or TrainingRows())
        selected = _selected(spec, selected_on)
        held_out = check_holdout(
            spec.register_as,
            spec.label_col,
            [*spec.input_cols, *spec.margin_cols],
            group_col=spec.group_col,
            trained_on=trained_on,
            selected_on=selected,
            check=lambda source: check_features(spec, dataset.schema(), source),
        )
        trained_on = trained_on.union(selected)
    user_code = UserCode() if spec.user_code is None else shipped_code.load_user_code(spec.user_code)
    # A staged copy has no version.
    version = None if spec.dataset.version is None else str(spec.dataset.version)
    data = DataResult(rows=dataset.num_rows(), digest=dataset.digest(), version=version)
    if times is not None:
        data = data.model_copy(update={"time_col": times.column, "time_from": times.first, "time_to": times.last})
    if spec.register_as:
        custom = user_code.objective is not None
        output = library_of(spec.framework).output_of(spec.params, custom_objective=custom)
        gate.try_challenger(spec.register_as, output)
    fingerprints: Fingerprints | None = None
    # A training with user code has no fingerprints and is never skipped, because shoal may not notice a change of the
    # code.
    if place.run and spec.register_as and spec.user_code is None:
        settings = spec
        if content is not None:
            # An alias or a file may have another model at the next training.
            settings = spec.model_copy(update={"init_model": hashlib.sha256(content).hexdigest()})
        fingerprints = fingerprints_of(settings, data.digest, held_out)
    return _Checked(dataset, data, base, content, trained_on if all_known else None, user_code, fingerprints)


def _profiled(spec: JobSpec, place: AttemptContext, checked: _Checked) -> TrainingProfile | None:
    """Check that the champion can be compared later, and compare its training rows with those of this training; None
    if the job registers no model."""
    if place.run is None or spec.register_as is None:
        return None
    gate.try_champion(place.run, spec.register_as)
    columns = [*spec.input_cols, spec.label_col]
    return profiled(place.run, spec.register_as, spec.dataset, checked.dataset.source, columns, spec.categorical_cols)


_OF_THE_RUN = ("run_config", "tracking", "fingerprint", "user_code", "dataset", "verbose_eval")
"""Fields of a spec that do not change the model, or are compared separately, as the dataset by its digest."""


def fingerprints_of(spec: JobSpec, rows: str, holdout: str) -> Fingerprints:
    """Return the fingerprints of a training from its spec, and from the digests of its rows and of its holdout."""

    assert spec.register_as is not None
    known = {spec.dataset.model_dump_json(): rows, spec.register_as.holdout.model_dump_json(): holdout}
    document = spec.document()
    document["seed"] = spec.run_config.seed
    for name in _OF_THE_RUN:
        document.pop(name, None)
    for name in ("holdout", "skip_if_unchanged"):
        document["register"].pop(name, None)
    document["eval_set"] = {
        name: known.get(each.model_dump_json()) or DataConnector.from_spec(each).digest()
        for name, each in spec.eval_set.items()
    }
    settings = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]
    distinct = {dataset.model_dump_json(): dataset for dataset in spec.datasets()}.values()
    times = [list(DataConnector.from_spec(dataset).write_times()) for dataset in distinct]
    if any(time is None for of_dataset in times for time in of_dataset):
        # If the write time of a file is not known, a change of the file cannot be noticed. So the digest is random, and
        # differs from every other digest.
        return Fingerprints(rows, holdout, settings, uuid4().hex)
    return Fingerprints(rows, holdout, settings, hashlib.sha256(json.dumps(times).encode()).hexdigest()[:32])


def _selected(spec: JobSpec, selected_on: DatasetSpec | None) -> TrainingRows:
    """Return a record of the rows on which a search chooses the parameters."""

    if selected_on is None:
        return TrainingRows()
    rows = DataConnector.from_spec(selected_on)
    has_times = spec.dataset.time_col in rows.schema().names
    return training_record.of_datasets(
        [(rows, rows.time_range(selected_on.time_col or (spec.dataset.time_col if has_times else None)))]
    )


def _published(
    spec: JobSpec,
    run: Run,
    place: AttemptContext,
    checked: _Checked,
    profile: TrainingProfile | None,
    trained: TrainResult,
    path: str,
) -> tuple[str, Outcome | None]:
    """Log the model to MLflow, and enter it into the comparison with the champion if the job registers it.

    Returns:
        The model's URI in MLflow, and the outcome of the comparison.
    """
    with saved_before(path):
        place.metrics.flush()
        run.log_values({"rows": trained.rows, "train_seconds": trained.seconds})
    # pandas' nullable types are left out, because MLflow would refuse missing values in integer columns.
    sample = take_rows(checked.dataset.iter_batches(list(spec.input_cols)), 100).to_pandas()
    booster = trained.booster()
    with saved_before(path):
        uri = run.log_model(trained.framework, booster, sample, base_margin_cols=spec.margin_cols)
    if not spec.register_as:
        return uri, None
    with place.stopwatch.scoring(), saved_before(path):
        outcome = gate.enter(
            place,
            run,
            spec.register_as,
            model_uri=uri,
            model=loading.predictor_of(booster, base_margin_cols=spec.margin_cols),
            label_col=spec.label_col,
            group_col=spec.group_col,
            trained_on=checked.trained_on,
            tags=checked.data.tags(),
            profile=profile,
        )
    if checked.fingerprints:
        with only_printed("the version could not be tagged, so the next training is not skipped"):
            training_record.mark(run, spec.register_as, outcome.challenger.version.number, checked.fingerprints)
    return uri, outcome


def _train(spec: JobSpec, place: AttemptContext, checked: _Checked) -> TrainResult:
    from shoal.training.boosting.engine import train

    trained = train(
        spec,
        user_code=checked.user_code,
        init_model=checked.init_model,
        env=place.environment,
        on_progress=place.on_progress,
        metrics=place.metrics,
        keep_gpu_choice=place.keep_gpu_choice,
    )
    place.stopwatch.worked(
        read_s=max((worker.read_seconds + worker.quantise_seconds for worker in trained.workers), default=0.0),
        train_s=max((worker.train_seconds for worker in trained.workers), default=0.0),
    )
    return trained


def _skipped(spec: JobSpec, place: AttemptContext, data: DataResult, fingerprints: Fingerprints) -> JobResult | None:
    """Return the result of a job that skips its training because the newest version has the same rows and settings."""
    run, register = place.run, spec.register_as
    if run is None or register is None or not register.skip_if_unchanged:
        return None
    holder = place.tags[HOLDER_TAG]
    found = training_record.reason_to_skip(run, place.store, place.key, holder, register, fingerprints)
    if found is None:
        return None
    version, reason = found
    print(f"skipped: {reason}", flush=True)
    with only_printed("the MLflow run could not be tagged as skipped"):
        run.client.set_tag(run.run_id, training_record.SKIPPED, reason)
    uri = f"models:/{register.model}/{version}"
    return place.result(
        model_path=uri,
        model_uri=uri,
        rows=data.rows,
        data=data,
        model_name=register.model,
        model_version=version,
        skipped=reason,
    )


def _params(spec: JobSpec) -> dict[str, Any]:
    return {
        **spec.params,
        "framework": spec.framework,
        "n_estimators": spec.n_estimators,
        "input_cols": ", ".join(spec.input_cols),
        "label_col": spec.label_col,
        **({"categorical_cols": ", ".join(spec.categorical_cols)} if spec.categorical_cols else {}),
        "num_workers": spec.scaling_config.num_workers,
        "shoal.seed": spec.run_config.seed,
    }


def _final_metrics(trained: TrainResult) -> dict[str, float]:
    """Return the model's metrics in the best round if there was early stopping, otherwise in the last round."""
    return {
        metric_name(evaluated, metric): values[trained.final_round]
        for evaluated, series in trained.eval_results.items()
        for metric, values in series.items()
    }
