"""A Ray cluster of two one-CPU nodes on loopback, shared by the tests that train, and rows to train on."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until

# Before Ray is imported: without these it may listen beyond loopback and report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

COLUMNS = ["a", "b", "c"]
ROWS = 6_000

# Ray takes 14 s to notice a dead raylet; a test that kills one should not wait that long for the next node.
_NOTICE = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
_NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}


class TwoNodes:
    """The head, "a-head", and one more node, "b", which a test may kill.

    Attributes:
        folder: What they write to, the temp folder of their workers as well.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="two-"))  # short: Ray puts AF_UNIX sockets there
        (self.folder / "ray").mkdir()  # where it notes its address
        self.cluster: Any = None
        try:
            with self._own_temp():
                self.cluster = Cluster(
                    initialize_head=True,
                    head_node_args={
                        **_NODE,
                        "node_name": "a-head",
                        "temp_dir": str(self.folder),
                        "include_dashboard": False,
                        "include_log_monitor": False,
                        "no_monitor": True,
                        "_system_config": _NOTICE,
                    },
                )
            self.add_second()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End both, and remove all that they wrote."""
        if self.cluster is not None and self.cluster.head_node is not None:
            self.cluster.shutdown()
        # A node that has failed to start belongs to no cluster, but some of its processes run.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(str(self.folder) in part for part in process.cmdline()):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _own_temp(self) -> Iterator[None]:
        """What Ray's processes leave when they are killed goes with the folder."""
        with pytest.MonkeyPatch.context() as environment:
            for name in ("RAY_TMPDIR", "TMPDIR"):
                environment.setenv(name, str(self.folder))
            yield

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_second(self) -> None:
        with self._own_temp():
            self.second: Any = self.cluster.add_node(**_NODE, node_name="b")

    def kill_second(self) -> None:
        """SIGKILL for the node's raylet; its workers are left to notice."""
        self.second.all_processes["raylet"][0].process.kill()

    def drain_second(self) -> None:
        """Announce the end of the second node, as Ray's autoscaler and `ray drain-node` do."""
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        from shoal.training.cluster import leaving_nodes

        client = self.cluster.head_node.get_gcs_client()
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + 600) * 1000)
        accepted, why = client.drain_node(self.second.node_id, reason, "the spot machine is taken back", deadline_ms)
        assert accepted, why
        wait_until(lambda: self.second.node_id in leaving_nodes(), "Ray to tell it")

    @contextmanager
    def third(self) -> Iterator[None]:
        """A third node, "c"."""
        with self._own_temp():
            node = self.cluster.add_node(**_NODE, node_name="c")
        try:
            yield
        finally:
            self.cluster.remove_node(node, allow_graceful=False)

    def replace_second(self) -> None:
        import ray

        gone = self.second.node_id
        self.cluster.remove_node(self.second, allow_graceful=False)
        wait_until(lambda: not any(n["NodeID"] == gone and n["Alive"] for n in ray.nodes()), "Ray to miss the node")
        self.add_second()


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[TwoNodes]:
    """One for the session."""
    nodes = TwoNodes()
    yield nodes
    nodes.end()


@contextmanager
def connected(nodes: TwoNodes) -> Iterator[None]:
    """Connect this process to the two nodes as a driver, and end the gangs that it keeps idle at the end."""
    import ray

    from shoal.training.gang.gang import end_gangs

    ray.shutdown()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield
    end_gangs()
    ray.shutdown()


def write_rows(folder: Path, rows: int = ROWS, files: int = 3, seed: int = 0) -> Path:
    """Parquet files with float32 columns a, b, c, a regression label y, a class label k, a weight w and a margin m."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(np.diff(np.linspace(0, rows, files + 1).astype(int))):
        x = rng.normal(size=(count, 3)).astype(np.float32)
        y = (2 * x[:, 0] - x[:, 1] ** 2 + rng.normal(scale=0.1, size=count)).astype(np.float32)
        table = pa.table(
            {
                **dict(zip(COLUMNS, x.T, strict=True)),
                "y": y,
                "k": (y > 0).astype(np.int64) + (y > 1),
                "w": rng.uniform(0.5, 2, size=count).astype(np.float32),
                "m": np.full(count, 5, np.float32),
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=1_000)
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6,000 rows in 3 files of 2 row groups."""
    return write_rows(tmp_path_factory.mktemp("rows"))


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; a zombie has ended."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            continue
    return running


def assert_ended(pids: list[int], seconds: float = 30) -> None:
    """None of them is left; the kernel closes the sockets of a process, which a driver sees, just before its end."""
    wait_until(lambda: not alive(pids), f"processes {pids} to end", seconds)
