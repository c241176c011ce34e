from __future__ import annotations

from typing import Literal

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs.spec import AnyJobSpec
from shoal.training.demand import ScalingConfig


class CountSpec(AnyJobSpec):
    framework: Literal["row_count"] = "row_count"
    dataset: DatasetSpec
    scaling_config: ScalingConfig = ScalingConfig(num_workers=1, num_cpu_per_worker=1)

    def _subject(self) -> str:
        return "number of rows"
