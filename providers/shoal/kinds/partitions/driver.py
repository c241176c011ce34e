"""Call a function for each partition of a dataset in the driver of the job, and log and register its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.connector import DataConnector
from shoal.jobs.driver.attempt_context import AttemptContext, before_work, only_printed, saved_before
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.kind import KindDriver
from shoal.jobs.mlflow_run import Run, answering, missing_ignored, retrying_briefly
from shoal.jobs.results import FailedPartition, JobResult, failed_text
from shoal.kinds.partitions import logged_model
from shoal.kinds.partitions.call import program_of_spec
from shoal.kinds.partitions.keys import check_same_kinds, key_type, shown_key
from shoal.kinds.partitions.partition_results import PartitionResults
from shoal.kinds.partitions.spec import PartitionsJobSpec, PartitionsRegister
from shoal.models import gate, loading, training_record
from shoal.models.contest import Outcome, champion_of
from shoal.models.holdout import check_holdout
from shoal.models.training_record import TrainingRows
from shoal.secrets.redaction import one_line

if TYPE_CHECKING:
    from shoal.kinds.partitions.engine import Answer

_MOST_FAILED = 5
"""Number of failed partitions that the job's result names."""


class PartitionsDriver(KindDriver[PartitionsJobSpec, AttemptContext]):
    """A function for each partition: processes all partitions, and registers their models."""

    def begin(self) -> None:
        """Prepare the imports of the workers, so that they start sooner."""
        from shoal.kinds.partitions.engine import import_ahead_for_workers

        super().begin()
        import_ahead_for_workers(self.spec)

    def work(self, place: AttemptContext) -> tuple[JobResult, str]:
        """Process all partitions, and return the job's result and the digest of the manifest.

        Raises:
            ShoalError: The job failed; the message has the cause.
        """
        from shoal.kinds.partitions.engine import run

        spec = self.spec
        program = program_of_spec(spec)
        location = spec.run_config.artifact_location
        folder, claim = place.checked_folder(location)
        trained_on = _begin_tracking(spec, place)
        artifacts.mark(folder, claim)
        answer = run(
            spec,
            program,
            claim=claim,
            folder=folder,
            earlier=[artifacts.folder(key, location) for key in attempts.without_success(place.store, place.key)],
            env=place.environment,
            may_publish=place.is_current,
            on_progress=place.on_progress,
        )
        place.stopwatch.worked(train_s=answer.seconds)
        place.on_trained()
        uri, outcome, first = answer.folder, None, _first_failed(answer)
        failed, has_failed = failed_text(answer.counts, map(str, first)), spec.has_failed(answer.counts)
        if place.run:
            counts = {f"partitions/{state}": count for state, count in answer.counts.items()}
            # The results are complete, so the job does not fail if MLflow is away.
            with (
                only_printed("the numbers of partitions could not be logged to MLflow"),
                retrying_briefly(place.environment),
            ):
                place.run.log_values({"rows": answer.rows, **counts, "process_seconds": answer.seconds})
            if register := spec.register_as:
                if has_failed:
                    register = register.model_copy(update={"promote": False})
                with place.stopwatch.scoring(), saved_before(answer.folder):
                    uri, outcome = _register(spec, register, place, place.run, answer, trained_on, failed)
        counted = ", ".join(
            f"{count:,} partition{'' if count == 1 else 's'} {state}" for state, count in answer.counts.items() if count
        )
        print(f"{counted}, written to {answer.folder}", flush=True)
        result = place.finished(
            answer,
            outcome.result() if outcome else {},
            model_path=answer.folder,
            model_uri=uri,
            metrics=outcome.metrics if outcome else {},
            results_path=answer.manifest,
            rows=answer.rows,
            partitions=answer.counts,
            failed_partitions=first,
            failure=_failure(spec, answer, failed, outcome) if has_failed else None,
            peak_memory_per_worker=answer.peak_memory_per_worker,
        )
        return result, answer.digest


def _first_failed(answer: Answer) -> tuple[FailedPartition, ...]:
    """Return the first failed partitions, in the order of their keys."""
    if not answer.counts["failed"]:
        return ()
    found = PartitionResults(answer.manifest, answer.digest).failed[:_MOST_FAILED]
    return tuple(FailedPartition(key=shown_key(each.key), cause=one_line(each.error)) for each in found)


def _failure(spec: PartitionsJobSpec, answer: Answer, failed: str, outcome: Outcome | None) -> str:
    waits = f"{outcome.model} version {outcome.challenger.version} waits for a decision, and " if outcome else ""
    return (
        f"{failed}; max_failed={spec.max_failed} allows fewer: {waits}the results of the other "
        f"{answer.counts['succeeded']:,} are stored; a further attempt repeats only the failed ones"
    )


def _begin_tracking(spec: PartitionsJobSpec, place: AttemptContext) -> TrainingRows:
    """Log the parameters and the dataset, check the holdout, and return a record of the training rows."""
    tracked = place.run
    if tracked is None:
        return TrainingRows()
    connector = DataConnector.from_spec(spec.dataset)
    by = ", ".join(spec.by)
    trained_on = TrainingRows()
    if spec.register_as and spec.label_col:
        columns = list(dict.fromkeys((*spec.by, *spec.input_cols)))
        logged_model.signature_of(connector.schema(), spec.by, spec.input_cols)
        keys = key_type(connector.source, spec.by)
        trained_on = training_record.of_datasets([(connector, connector.time_range(spec.dataset.time_col))])
        check_holdout(
            spec.register_as,
            spec.label_col,
            columns,
            trained_on=trained_on,
            check=lambda holdout: check_same_kinds(key_type(holdout, spec.by), keys, spec.by),
        )
        gate.try_champion(tracked, spec.register_as, columns)
    with before_work(tracked.uri, place.environment):
        tracked.log_params({"function": spec.function_name, "by": by, "framework": spec.framework})
        tracked.log_dataset(by, connector.digest(), spec.dataset.origin, context="partitions")
    return trained_on


def _register(
    spec: PartitionsJobSpec,
    register: PartitionsRegister,
    place: AttemptContext,
    run: Run,
    answer: Answer,
    trained_on: TrainingRows,
    failed: str,
) -> tuple[str, Outcome]:
    """Log the models as one model, and register it; return its URI. The decision names the partitions that failed."""

    assert spec.label_col is not None
    results = PartitionResults(answer.manifest, answer.digest)
    champion = None
    with answering(run.uri), missing_ignored():
        champion = champion_of(run.client, register)
    uri, kept = logged_model.log(
        results,
        by=spec.by,
        input_cols=spec.input_cols,
        schema=DataConnector.from_spec(spec.dataset).schema(),
        champion=None if champion is None else f"models:/{register.model}/{champion}",
    )
    if kept:
        print(f"{kept:,} partitions whose training failed keep the model of version {champion}", flush=True)
    columns = list(dict.fromkeys((*spec.by, *spec.input_cols)))
    outcome = gate.enter(
        place,
        run,
        register,
        model_uri=uri,
        model=loading.load(uri, columns),
        label_col=spec.label_col,
        input_cols=columns,
        trained_on=trained_on,
        note=failed,
    )
    return uri, outcome
