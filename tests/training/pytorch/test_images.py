"""Rows of an image and its label, as people keep MNIST in a table, from Parquet to DDP on two real Ray nodes."""

from __future__ import annotations

import base64
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import ShardedDataConnector
from tests.support.two_node_cluster import TwoNodes
from tests.training.pytorch import functions
from tests.training.pytorch.test_run import distributor

pytestmark = pytest.mark.ray

# No multiple of 2: one of the ranks sees one row twice.
ROWS = 2_601


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Grey 28x28 images as base64, a bright stripe where their label says; the first pixels hold label and number."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, ROWS)
    pixels = rng.integers(0, 100, (ROWS, 28, 28), np.uint8)
    for number, label in enumerate(labels):
        pixels[number, 4 + 2 * label : 6 + 2 * label] = 250
        pixels[number, 0, :3] = (label, *divmod(number, 256))
    encoded = [base64.b64encode(image.tobytes()).decode() for image in pixels]
    pq.write_table(pa.table({"image": encoded, "label": labels}), tmp_path / "images.parquet", row_group_size=300)
    return tmp_path / "images.parquet"


@pytest.mark.long
def test_ranks_train_on_decoded_rows_and_see_each_once(driver: TwoNodes, tmp_path: Path, images: Path) -> None:
    dataset = ShardedDataConnector.from_parquet(images)
    ranks = distributor(functions.learn_images, tmp_path).run(32, dataset_map={"images": dataset}).get_results()
    every = -(-ROWS // 2)
    for rank in ranks:
        assert rank["kinds"] == {"image": {"str"}, "label": {"int"}}
        assert len(rank["by_row"]) == every
        assert rank["shapes"] == [(1, 1024), (1, every - 1024)]
        assert rank["losses"][-1] < 0.5 * rank["losses"][0]
    assert ranks[0]["losses"] != ranks[1]["losses"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    labels = dict(enumerate(np.random.default_rng(0).integers(0, 10, ROWS).tolist()))
    for way in ("by_row", "by_batch"):
        seen = [image for rank in ranks for image in rank[way]]
        assert all(label == in_image == labels[number] for number, in_image, label in seen)
        times = Counter(number for number, _, _ in seen)
        assert times.keys() == labels.keys()
        assert sorted(times.values()) == [1] * (ROWS - 1) + [2]
