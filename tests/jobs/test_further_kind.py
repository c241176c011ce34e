"""A further kind of job is its folder and a line in the registry: submitted, run on a pool, read, and listed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.support import registered

REGISTRATION = """
from shoal.jobs import kind
kind._KINDS["row_count"] = kind._Kind("tests.support.row_count", "CountSpec", "CountDriver", "CountCall")
"""


def use() -> None:
    from typer.testing import CliRunner

    from shoal import ComputePool
    from shoal.cli import app
    from shoal.distributors import attach
    from shoal.distributors.call import Call
    from shoal.jobs import attach as attach_job
    from shoal.jobs.kind import call_of, parse_spec

    pool = ComputePool("local://further?max_nodes=1&ray=false").up()
    try:
        config = {"job_id": "counted", "pool_name": "further"}
        spec = parse_spec({"framework": "row_count", "dataset": {"paths": ["rows.parquet"]}, "run_config": config})
        assert Call(call_of(spec)).submit().result() == 7 == attach("counted").result()
        result = attach_job("counted").status().result
        assert result is not None and result.rows == 7
        for command in (["jobs", "list"], ["jobs", "show", "counted"]):
            shown = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
            assert shown.exit_code == 0 and "number of rows" in shown.output, shown.output
    finally:
        pool.down()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_kind_that_is_registered_by_one_line_runs_on_a_pool(tmp_path: Path, fresh_home: Path) -> None:
    pd.DataFrame({"x": range(7)}).to_parquet(tmp_path / "rows.parquet")
    registered.run(use, REGISTRATION, tmp_path, fresh_home)
