from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Self

from pydantic import Field

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs.spec import AnyJobSpec
from shoal.training.demand import GangClaim, GangDemand


class CountSpec(AnyJobSpec):
    framework: Literal["row_count"] = Field(default="row_count", description="Kind of the job.")
    dataset: DatasetSpec = Field(description="Dataset whose rows are counted.")

    def _subject(self) -> str:
        return "number of rows"

    def demand(self) -> GangDemand:
        gang = GangClaim(1, 1)
        return GangDemand(gang, gang.size, self.run_config, (self.dataset,))

    def inputs(self) -> Iterator[DatasetSpec]:
        yield self.dataset

    def with_datasets(self, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        return super().with_datasets(replaced).model_copy(update={"dataset": replaced(self.dataset)})
