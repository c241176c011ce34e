"""Sampling and binning a shard, without a gang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.errors import DataError
from shoal.training.boosting.messages import Columns, Part, Task
from shoal.training.boosting.rows import ShardRows
from shoal.training.lightgbm.dataset import Binned, find_bins, sample
from shoal.training.lightgbm.library import shares
from shoal.training.lightgbm.worker import binary_check
from tests.support.two_node_cluster import COLUMNS, ROWS

PARAMS = {"num_leaves": 7, "verbosity": -1, "num_threads": 1, "deterministic": True, "force_col_wise": True}


def shard_rows(rows: Path, budget: int = 0, **columns: Any) -> ShardRows:
    connector = DataConnector.from_parquet(rows)
    part = Part(connector, connector.plan(1, 0)[0])
    return ShardRows(part, Columns(tuple(COLUMNS), "y", **columns), budget, keep_types=True)


def reference(rows: ShardRows) -> lightgbm.Dataset:
    (share,) = shares([ROWS])
    return find_bins(sample(rows, share, PARAMS, 0), COLUMNS, PARAMS, threads=1).reference({})


def test_each_contributes_in_proportion_and_always_the_same_rows() -> None:
    parts = shares([50, 30, 21])
    chosen = [part.chosen(10, 3) for part in parts]
    assert [len(rows) for rows in chosen] == [4, 2, 4] or sum(map(len, chosen)) == 10
    for part, rows in zip(parts, chosen, strict=True):
        assert abs(len(rows) - part.rows * 10 / 101) < 1
        assert len(set(rows)) == len(rows) and max(rows) < part.rows
        np.testing.assert_array_equal(rows, np.sort(rows))
        np.testing.assert_array_equal(rows, part.chosen(10, 3))
    assert [len(part.chosen(1_000, 3)) for part in parts] == [50, 30, 21]


def test_the_sampled_rows_are_those_that_were_chosen(rows: Path) -> None:
    shard = shard_rows(rows)
    everything = pa.concat_tables([batch.data for batch in shard])
    (share,) = shares([ROWS])
    some = sample(shard, share, {"bin_construct_sample_cnt": 100}, 5)
    assert some == everything.take(share.chosen(100, 5))


def test_every_row_with_its_label_weight_and_margin(rows: Path) -> None:
    shard = shard_rows(rows, weight="w", base_margin=("m",))
    binned = Binned(shard, reference(shard))
    binned.start_from(None, 1)
    table = DataConnector.from_parquet(rows).to_pandas()
    assert binned.dataset.num_data() == ROWS
    assert binned.dataset.feature_name == COLUMNS
    np.testing.assert_array_equal(binned.dataset.get_label(), table["y"])
    np.testing.assert_array_equal(binned.dataset.get_weight(), table["w"])
    np.testing.assert_array_equal(binned.dataset.get_init_score(), table["m"])


@pytest.mark.parametrize(("budget", "passes"), [(2**30, 1), (0, 3)])
def test_rows_that_fit_are_decoded_once_and_others_in_each_pass_to_the_same_scores(
    rows: Path, budget: int, passes: int
) -> None:
    shard = shard_rows(rows, budget)
    binned = Binned(shard, reference(shard))
    model = lightgbm.train(PARAMS, binned.dataset, 5)
    binned.start_from(model, 1)
    table = DataConnector.from_parquet(rows).to_pandas()
    np.testing.assert_array_equal(binned.dataset.get_init_score(), model.predict(table[COLUMNS], raw_score=True))
    assert shard.passes == passes


def test_several_scores_per_row(rows: Path) -> None:
    params = {**PARAMS, "objective": "multiclass", "num_class": 3}
    connector = DataConnector.from_parquet(rows)
    shard = ShardRows(Part(connector, connector.plan(1, 0)[0]), Columns(tuple(COLUMNS), "k"), 0, keep_types=True)
    binned = Binned(shard, reference(shard))
    model = lightgbm.train(params, binned.dataset, 2)
    binned.start_from(model, 1)
    values = connector.to_pandas()[COLUMNS]
    np.testing.assert_array_equal(binned.dataset.get_init_score(), model.predict(values, raw_score=True))


def test_a_table_in_memory_gives_the_same_dataset_without_decoding_the_rows_again(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    features = {
        "wide": pa.array(random.normal(size=ROWS).astype(np.float32), mask=random.random(ROWS) < 0.1),
        "double": pa.array(np.where(random.random(ROWS) < 0.1, np.nan, random.normal(size=ROWS))),
        "mostly_zero": pa.array(np.where(random.random(ROWS) < 0.9, 0.0, 1e300)),
        "whole": pa.array(random.integers(-5, 2**60, ROWS), mask=random.random(ROWS) < 0.1),
        "small": pa.array(random.integers(0, 9, ROWS).astype(np.uint8)),
        "flag": pa.array(random.random(ROWS) < 0.5, mask=random.random(ROWS) < 0.1),
    }
    notes = {name: pa.array(random.integers(0, 2, ROWS).astype(np.float32)) for name in ("y", "w", "m")}
    pq.write_table(pa.table(features | notes), tmp_path / "rows.parquet", row_group_size=ROWS // 3)
    connector = DataConnector.from_parquet(tmp_path / "rows.parquet")
    columns = Columns(tuple(features), "y", weight="w", base_margin=("m",))
    shard = ShardRows(Part(connector, connector.plan(1, 0)[0]), columns, 0, keep_types=True)
    params = {**PARAMS, "categorical_feature": ["small"]}
    table = sample(shard, shares([ROWS])[0], params, 0)
    made = find_bins(table, list(features), params, threads=1).reference({})
    passes = shard.passes
    for name, given in (("table", table), ("rows", None)):
        binned = Binned(shard, made, table=given)
        assert shard.passes == passes + (given is None)
        binned.start_from(None, 1)
        binned.dataset.save_binary(tmp_path / name)
    assert (tmp_path / "table").read_bytes() == (tmp_path / "rows").read_bytes()


def test_categories_stay_categories(rows: Path) -> None:
    connector = DataConnector.from_parquet(rows)
    shard = ShardRows(Part(connector, connector.plan(1, 0)[0]), Columns(("k", "a"), "y"), 0, keep_types=True)
    (share,) = shares([ROWS])
    params = {**PARAMS, "categorical_feature": ["k"]}
    binned = Binned(shard, find_bins(sample(shard, share, params, 0), ["k", "a"], params, threads=1).reference({}))
    assert "cat_threshold=" in lightgbm.train(PARAMS, binned.dataset, 2).model_to_string()


def test_a_binary_objective_takes_zero_and_one_only(rows: Path) -> None:
    part = shard_rows(rows).part
    task = Task(part, {}, Columns(tuple(COLUMNS), "k"), {"objective": "binary"})
    with pytest.raises(DataError, match=r'part-0.parquet, row group 0: the label "k" is 2.0 at row \d+, but .*binary'):
        list(ShardRows(part, task.columns, 0, binary_check(task)))
    assert binary_check(Task(part, {}, task.columns, {"objective": "poisson"})) is None


def test_a_worker_that_was_sent_the_bins_has_those_of_the_sample():
    """Also of categories, of rare values and of missing ones; LightGBM with all threads finds the same."""
    rng = np.random.default_rng(0)
    sampled = rng.normal(size=(3_000, 6)).astype(np.float32)
    sampled[:, 1] = rng.integers(0, 9, len(sampled))
    sampled[:, 2:4] = sampled[:, 2:4] > 1.9  # exclusive features, which LightGBM bundles
    sampled[rng.random(len(sampled)) < 0.1, 4] = np.nan
    sampled[:, 5] = 7
    sampled[::9, 0] = 0
    sampled[1::9, 0] = 1e-36  # which LightGBM takes for zero
    names = [f"f{i}" for i in range(6)]
    params = {"verbosity": -1, "num_threads": 1, "objective": "regression"}
    label = np.nan_to_num(sampled).sum(axis=1)

    def model(reference: lightgbm.Dataset) -> str:
        rows = lightgbm.Dataset(sampled, label, reference=reference, params=reference.get_params())
        return lightgbm.train(params, rows, 10).model_to_string()

    of_params = {**params, "bin_construct_sample_cnt": len(sampled), "num_machines": 1}
    whole = lightgbm.Dataset(
        sampled, np.zeros(len(sampled)), feature_name=names, categorical_feature=[1], params=of_params
    ).construct()
    expected = model(whole)
    for threads, categorical in ((1, 1), (2, "f1")):
        bins = find_bins(
            pa.table(dict(zip(names, sampled.T, strict=True))),
            names,
            {**params, "categorical_feature": [categorical]},
            threads,
        )
        assert model(bins.reference({})) == expected
        assert bins.params["num_threads"] == 1
