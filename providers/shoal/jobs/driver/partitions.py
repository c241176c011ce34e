"""Call a function for each partition of a dataset in the driver of the job, and log the numbers of partitions."""

from __future__ import annotations

from contextlib import suppress

from shoal.data.connector import DataConnector
from shoal.errors import ShoalError
from shoal.jobs.driver.context import AttemptContext, before_work, only_printed
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow.job_run import retrying_briefly
from shoal.jobs.partitions.program import program_of_spec
from shoal.jobs.results import JobResult
from shoal.jobs.specs.partitions import PartitionsJobSpec
from shoal.state.schema import JobState


def begin(spec: PartitionsJobSpec) -> None:
    """Prepare the imports of the workers, so that they start sooner."""
    from shoal.jobs.partitions.engine import import_ahead_for_workers

    with suppress(ShoalError):  # if the workers do not fit, `run` raises the error
        import_ahead_for_workers(spec)


def work(spec: PartitionsJobSpec, place: AttemptContext) -> tuple[JobResult, str]:
    """Process all partitions, and return the job's result and the digest of the manifest.

    Raises:
        ShoalError: The job failed; the message has the cause.
    """
    from shoal.jobs.partitions.engine import run

    program = program_of_spec(spec)
    location = spec.run_config.artifact_location
    claim, folder = place.claim(), artifacts.folder(place.key, location)
    artifacts.check(folder, claim, location)
    if tracked := place.run:
        digest = DataConnector.from_spec(spec.dataset).digest()
        with before_work(tracked.uri, place.environment):
            tracked.log_params({"function": spec.function_name, "by": ", ".join(spec.by), "framework": spec.framework})
            tracked.log_dataset(", ".join(spec.by), digest, spec.dataset.origin, context="partitions")
    artifacts.mark(folder, claim)
    answer = run(
        spec,
        program,
        claim=claim,
        folder=folder,
        earlier=_unfinished(place, location),
        env=place.environment,
        may_publish=place.is_current,
        on_progress=place.on_progress,
    )
    place.stopwatch.worked(train_s=answer.seconds)
    if tracked:
        # The results are complete, so the job does not fail if MLflow is away.
        with (
            only_printed("the numbers of partitions could not be logged to MLflow"),
            retrying_briefly(place.environment),
        ):
            values = {"rows": answer.rows, **{f"partitions/{state}": count for state, count in answer.counts.items()}}
            tracked.log_values({**values, "process_seconds": answer.seconds})
    counted = ", ".join(f"{count:,} partitions {state}" for state, count in answer.counts.items() if count)
    print(f"{counted}, written to {answer.folder}", flush=True)
    result = place.result(
        model_path=answer.folder,
        model_uri=answer.folder,
        results_path=answer.manifest,
        rows=answer.rows,
        partitions=answer.counts,
        num_workers=answer.num_workers,
        times=place.times(),
        restarts=answer.restarts,
        peak_memory_per_worker=answer.peak_memory_per_worker,
    )
    return result, answer.digest


def _unfinished(place: AttemptContext, location: str | None) -> list[str]:
    """Return the artifact folders of the earlier attempts that did not succeed, the newest first."""
    earlier = [Key(place.key.job_id, attempt) for attempt in range(place.key.attempt - 1, 0, -1)]
    return [
        artifacts.folder(key, location)
        for key in earlier
        if attempts.state(place.store, key) in (JobState.FAILED, JobState.CANCELLED)
    ]
