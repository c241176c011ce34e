"""A call that calls a function for each partition of a dataset, in the process of its caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.jobs import shipped_code
from shoal.jobs.files import storage
from shoal.jobs.kind import KindCall
from shoal.kinds.partitions.spec import PartitionsJobSpec
from shoal.training import locations

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.kinds.partitions.partition_results import PartitionResults
    from shoal.training.locations import Claim


class PartitionsCall(KindCall[PartitionsJobSpec, Any, "PartitionResults"]):
    """A function for each partition; the code is its program, or None if the spec has an estimator."""

    tracks_like_caller = True

    @property
    def may_call_ray(self) -> bool:  # type: ignore[override]
        """Whether the function may call Ray."""
        from shoal.training.pytorch.program import may_call_ray

        return self.code is not None and may_call_ray(self.code.content)

    def check(self) -> None:
        """Find errors such as a misspelt column or folder before a pool is started.

        Raises:
            DataError: The footers of the Parquet files show that the estimator cannot use the data.
            InvalidArgumentError: The folder for the results cannot be written.
        """
        from shoal.training.boosting.rows import checked_data

        spec = self.spec
        locations.try_out(storage.root(spec.run_config.artifact_location))
        if spec.estimator is not None:
            checked_data(spec.estimator.request(spec.dataset, spec.run_config))

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
        from shoal.kinds.partitions.partition_program import program_of_spec
        from shoal.kinds.partitions.partition_results import PartitionResults

        location = self.spec.run_config.artifact_location
        folder = artifacts.folder(Key(claim.job_id, claim.attempt), location)
        artifacts.check(folder, claim, location)
        artifacts.mark(folder, claim)
        answer = run(self.spec, self.code or program_of_spec(self.spec), claim=claim, folder=folder, env=env)
        return PartitionResults(answer.manifest, answer.digest)
