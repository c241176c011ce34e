from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.data.connector import DataConnector
from shoal.jobs.kind import KindCall
from tests.support.row_count.spec import CountSpec

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.training.locations import Claim


class CountCall(KindCall[CountSpec, None, int]):
    def read(self, result: JobResult, location: str | None) -> int:
        assert result.rows is not None
        return result.rows

    def run_here(self, env: Mapping[str, str], claim: Claim) -> int:
        return DataConnector.from_spec(self.spec.dataset).num_rows()
