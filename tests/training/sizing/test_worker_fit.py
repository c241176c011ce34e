"""In which memory a worker trains with all rows in memory, from disk, or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.data import ArrowIngester, DataConnector, RayDataIngester
from shoal.data.planning import RowRange, Shard
from shoal.errors import DataError, OutOfMemoryError
from shoal.training.boosting.messages import Columns, Part, Task
from shoal.training.boosting.worker_fit import _CHEAP_BYTES as CHEAP
from shoal.training.boosting.worker_fit import (
    WorkerFit,
    _cache_budget,
    fit_worker,
    naming_memory,
    refuse_if_too_large,
)
from shoal.training.boosting.worker_load import worker_load
from shoal.training.sizing.worker_memory import WorkerLoad, worker_memory
from tests.support.two_node_cluster import COLUMNS

MIB = 2**20
WIDE = WorkerLoad(
    rows=50_000,
    eval_rows=0,
    features=500,
    max_bin=256,
    bins=128_000,
    bin_bytes=1,
    row_bin_bytes=1,
    nodes=64,
    outputs=1,
    feature_bytes=2_000,
    batch_bytes=2_800 * 2_000,
)
"""A table whose sketches need more than all the rest."""


def task(rows: Path, external_memory: bool | None = None) -> Task:
    connector = DataConnector.from_parquet(rows)
    parts = [Part(connector, connector.plan(workers, 0)[0]) for workers in (1, 2)]
    return Task(parts[0], {"eval": parts[1]}, Columns(tuple(COLUMNS), "y"), {}, external_memory=external_memory)


def test_the_sketches_of_a_wide_table_count() -> None:
    memory = worker_memory("xgboost", WIDE)
    assert 450 * MIB < memory.above_idle < 700 * MIB
    assert next(iter(memory.terms())) == "sketches"
    assert worker_memory("xgboost", replace(WIDE, max_bin=64, bins=32_000)).above_idle < memory.above_idle / 2


def test_every_term_of_the_rows_shrinks_with_the_rows() -> None:
    for framework in ("xgboost", "lightgbm"):
        tall = replace(WIDE, rows=4_000_000, features=10, bins=2_560, feature_bytes=40)
        half = replace(tall, rows=2_000_000)
        assert worker_memory(framework, half).above_idle < 0.65 * worker_memory(framework, tall).above_idle


def test_rows_that_do_not_fit_in_memory_go_to_disk_unless_that_is_forbidden(rows: Path) -> None:
    need = fit_worker("xgboost", task(rows), 2**40).memory.least_above_idle
    assert not fit_worker("xgboost", task(rows), int(1.2 * need)).on_disk
    assert fit_worker("xgboost", task(rows), need - 100_000).on_disk
    assert fit_worker("xgboost", task(rows, external_memory=True), need).on_disk
    forbidden = task(rows, external_memory=False)
    tight = fit_worker("xgboost", forbidden, 1)
    assert not tight.on_disk
    refuse_if_too_large("xgboost", forbidden, tight)


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_terms_that_may_be_smaller_than_predicted_refuse_nothing(framework: str, rows: Path) -> None:
    fit = WorkerFit(worker_memory(framework, replace(WIDE, nodes=8_192)), room=300 * MIB)
    assert fit.verdict == "no"
    refuse_if_too_large(framework, task(rows), fit)


def test_lightgbms_pool_of_histograms_limits_them(rows: Path) -> None:
    params = {"num_leaves": 4_095, "histogram_pool_size": 0.1}
    load = worker_load("lightgbm", replace(task(rows), params=params), 1, 10, 0)
    assert load.nodes == math.ceil(0.1 * MIB / (16 * 255 * len(COLUMNS)))


@pytest.mark.parametrize(
    ("framework", "said"),
    [("xgboost", "XGBoost needs .* even with its quantised rows on disk"), ("lightgbm", "XGBEstimator")],
)
def test_a_training_that_does_not_fit_at_all_is_refused_with_the_terms(framework: str, said: str, rows: Path) -> None:
    fit = fit_worker(framework, task(rows), MIB)
    with pytest.raises(DataError, match=rf"(?s){said}") as caught:
        refuse_if_too_large(framework, task(rows), fit)
    assert "libraries 25 MiB" in str(caught.value)
    assert "only 1 MiB are available" in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "ingestor_class", "group_rows", "reads", "kept"),
    [
        ("/data/a.parquet", ArrowIngester, 5_000, 4, CHEAP),
        ("/data/a.parquet", ArrowIngester, 4_999, 4, 3 * CHEAP),
        ("/data/a.parquet", ArrowIngester, 4_999, 2, CHEAP),
        ("/data/a.parquet", ArrowIngester, 5_000, math.inf, 3 * CHEAP),
        ("s3://bucket/a.parquet", ArrowIngester, 5_000, 4, 3 * CHEAP),
        (["/data/a.parquet", "s3://bucket/b.parquet"], ArrowIngester, 5_000, 4, 3 * CHEAP),
        ("/data/a.parquet", RayDataIngester, 5_000, 4, 3 * CHEAP),
    ],
)
def test_rows_are_kept_where_it_is_dear_to_read_them_again(
    paths: str | list[str],
    ingestor_class: Any,
    group_rows: int,
    reads: float,
    kept: int,
) -> None:
    part = Part(
        DataConnector.from_parquet(paths, ingestor_class=ingestor_class),
        Shard((RowRange("/data/a.parquet", 0, 0, group_rows),)),
    )
    assert _cache_budget(part, 10 * CHEAP, 0, reads=reads) == kept
    assert _cache_budget(part, 10 * CHEAP, 10 * CHEAP - 5, reads=reads) == 5


def test_a_lack_of_memory_names_the_prediction_the_limit_and_what_to_ask_for(rows: Path) -> None:
    fit = fit_worker("xgboost", task(rows), 300 * MIB)
    with (
        pytest.raises(OutOfMemoryError, match=r"predicted to need .* 400 MiB, so give each worker at least 460"),
        naming_memory("xgboost", task(rows), fit, idle=100 * MIB),
    ):
        raise RuntimeError("std::bad_alloc")
    assert OutOfMemoryError.permanent
    with pytest.raises(ValueError, match=r"^other$"), naming_memory("xgboost", task(rows), fit, idle=0):
        raise ValueError("other")
