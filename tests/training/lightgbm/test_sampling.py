"""Parts of the sample in memory of this machine: another process reads them, until their owner frees them or ends."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pyarrow as pa
import pytest

from shoal.training import cluster
from shoal.training.lightgbm import dataset

READ = """
import pickle, sys
from shoal.training.lightgbm import dataset
table = dataset.fetch(pickle.loads(bytes.fromhex(sys.argv[1])))
sys.stdout.buffer.write(pickle.dumps(table.to_pydict()))
"""


def test_another_process_reads_the_rows_until_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ray_if_connected", lambda: None)
    table = pa.table({"a": [1.0, None], "k": pa.array(["x", "y"]).dictionary_encode()})
    reference = pickle.dumps(dataset.share(table))
    assert len(reference) < 200
    command = [sys.executable, "-c", READ, reference.hex()]
    read = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert pickle.loads(read.stdout) == table.to_pydict()
    dataset.forget()
    with pytest.raises(LookupError, match="has ended"):
        dataset.fetch(pickle.loads(reference))
