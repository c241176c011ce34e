from __future__ import annotations

from shoal.data.connector import DataConnector
from shoal.jobs.driver.attempt_context import AttemptContext
from shoal.jobs.kind import KindDriver
from shoal.jobs.results import JobResult
from tests.support.row_count.spec import CountSpec


class CountDriver(KindDriver[CountSpec, AttemptContext]):
    def work(self, place: AttemptContext) -> tuple[JobResult, None]:
        rows = DataConnector.from_spec(self.spec.dataset).num_rows()
        place.on_trained()
        return place.result(model_path="", model_uri="", rows=rows, times=place.times()), None
