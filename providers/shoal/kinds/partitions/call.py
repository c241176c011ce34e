"""A call of a function for each partition of a dataset, in the process of its caller, and the pickled function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.jobs import shipped_code
from shoal.jobs.kind import KindCall
from shoal.kinds.partitions.partition_messages import EstimatorTraining, PartitionProgram, SavedModel
from shoal.kinds.partitions.spec import PartitionsJobSpec
from shoal.training.boosting.library import import_package, library_of
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.rows import checked_data
from shoal.training.gang.placement import GangShape
from shoal.training.pickling import code_digest, pickled
from shoal.training.pytorch import program

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.kinds.partitions.partition_results import PartitionResults
    from shoal.training.locations import Claim


class PartitionsCall(KindCall[PartitionsJobSpec, PartitionProgram | None, "PartitionResults"]):
    """A function for each partition; the code is its program, or None if the spec has an estimator."""

    tracks_like_caller = True

    @property
    def may_call_ray(self) -> bool:  # type: ignore[override]
        """Whether the function may call Ray."""
        return self.code is not None and program.may_call_ray(self.code.content)

    def check(self) -> None:
        """Find errors such as a misspelt column or folder before a pool is started.

        Raises:
            DataError: The footers of the Parquet files show that the estimator cannot use the data.
            InvalidArgumentError: The folder for the results cannot be written.
        """
        spec = self.spec
        super().check()
        if spec.estimator is not None:
            checked_data(spec.estimator.request(spec.dataset, spec.run_config), takes_categories=False)

    def stored(self) -> dict[str, Any]:
        """Store the function."""
        return {} if self.code is None else {"program": shipped_code.store(self.code.content)}

    def read(self, result: JobResult, location: str | None) -> PartitionResults:
        """Load the outcomes of the partitions."""
        from shoal.jobs import load_partitions

        return load_partitions(result, location)

    def run_here(self, env: Mapping[str, str], claim: Claim) -> PartitionResults:
        """Process the partitions in the connected Ray cluster."""
        from shoal.jobs.files import artifacts
        from shoal.jobs.journal.attempts import Key
        from shoal.kinds.partitions.engine import run
        from shoal.kinds.partitions.partition_results import PartitionResults

        location = self.spec.run_config.artifact_location
        folder = artifacts.folder(Key(claim.job_id, claim.attempt), location)
        artifacts.check(folder, claim, location)
        artifacts.mark(folder, claim)
        answer = run(self.spec, self.code or program_of_spec(self.spec), claim=claim, folder=folder, env=env)
        return PartitionResults(answer.manifest, answer.digest)


def program_of(function: Callable[..., Any]) -> PartitionProgram:
    """Pickle a function with the variables of its closure.

    Raises:
        InvalidArgumentError: This is no function, it cannot be pickled, or it is too large.
    """
    program.check_runnable(function, "the function")
    content = pickled(function, program.name_of(function))
    if len(content) > program.MAX_BYTES:
        raise InvalidArgumentError(
            f"{program.name_of(function)} is {len(content) / 2**20:.0f} MiB large with the variables of its closure, "
            f"but the limit is {program.MAX_BYTES / 2**20:.0f} MiB: let the function read the data itself"
        )
    return PartitionProgram(content, code_digest(function))


def program_of_spec(spec: PartitionsJobSpec) -> PartitionProgram:
    """Return the pickled function of a spec, and check the data and parameters of an estimator.

    Raises:
        InvalidArgumentError: The function cannot be imported, or a parameter of the estimator is wrong.
        DataError: The estimator cannot train on the data.
        JobError: The file of the program was changed.
    """
    if spec.program is not None:
        content = shipped_code.read(spec.program)
        return PartitionProgram(content, spec.code_digest or hashlib.sha256(content).hexdigest())
    if spec.estimator is not None:
        request = spec.estimator.request(spec.dataset, spec.run_config)
        return estimator_program(request, spec.scaling_config.num_cpu_per_worker)
    assert spec.function is not None
    # Only the workers can import a function in the job's own packages or code.
    in_workers = spec.run_config.packages or spec.run_config.code
    function = partial(program.call_imported, spec.function) if in_workers else program.imported(spec.function)
    named = partial(function, **spec.kwargs) if spec.kwargs else function
    called = SavedModel(named) if spec.register_as else named
    return PartitionProgram(pickled(called, spec.function), code_digest(called))


def estimator_program(request: TrainRequest, threads: int, user_code: UserCode | None = None) -> PartitionProgram:
    """Check the data and parameters of an estimator, and return the pickled function that trains a partition.

    Raises:
        InvalidArgumentError: A parameter is wrong.
        DataError: The estimator cannot train on the data.
    """
    checked_data(request, takes_categories=False)
    code = user_code or UserCode()
    import_package(request.framework)
    params, seed = library_of(request.framework).params(request, GangShape(1, threads), code)
    training = EstimatorTraining(
        request.framework,
        {**params, "seed": seed},
        request.n_estimators,
        request.input_cols,
        request.label_col,
        request.weight_col,
        code,
    )
    return program_of(training)
