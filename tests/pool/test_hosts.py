"""A pool over several hosts, each with an address of its own, and links that are cut: what is said, what is left."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest

from shoal import ComputePool, jobs
from shoal.data import DataConnector
from shoal.errors import JobFailedError, ScaleError
from shoal.jobs import JobSpec
from shoal.pool.backends.local.backend import node_folder
from shoal.pool.options.local import LocalOptions
from shoal.state.schema import Node, NodeState
from shoal.training.demand import XGBScalingConfig
from shoal.training.run_config import RunConfig
from tests.support import ROOT
from tests.support import network_hosts_backend as hosts_backend
from tests.support.homes import new_home
from tests.support.network_hosts import Host, hosts, refusal
from tests.support.pool_processes import node_processes, node_rows, nothing_left
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def possible() -> None:
    if why := refusal():
        pytest.skip(why)


@pytest.fixture(scope="module")
def spread(possible) -> Iterator[ComputePool]:
    """A pool whose every node has a host of its own, also the ones that come later, and a reconciler here."""
    with new_home(), pytest.MonkeyPatch.context() as patch, hosts(8) as there:
        hosts_backend.use(there)
        patch.setattr(LocalOptions, "backend_class", f"{hosts_backend.__name__}:HostsBackend")
        patch.setattr("shoal.pool.reconciling.ensure_running", hosts_backend.ensure_running)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        pool = ComputePool("local://hosts?max_nodes=4")
        try:
            yield pool.up()
        finally:
            pool.down()
        nothing_left()


@pytest.fixture
def cut(spread) -> Iterator[list[Host]]:
    """Put in here what is cut: it is joined again afterwards."""
    found: list[Host] = []
    yield found
    for host in found:
        host.join()


def seen_by_ray(pool: ComputePool) -> dict[str, str]:
    """The nodes that live by what the head knows: name -> address."""
    endpoint = pool.endpoint()
    headers = {"Authorization": f"Bearer {endpoint.token()}"}
    url = f"{endpoint.api}/nodes?view=summary"
    answer = httpx.get(url, headers=headers, timeout=30, trust_env=False).json()
    nodes = [node["raylet"] for node in answer["data"]["summary"]]
    return {node["nodeName"]: node["nodeManagerAddress"] for node in nodes if node["state"] == "ALIVE"}


def gone(node: Node) -> bool:
    """No row, process or folder of it."""
    return (
        node.id not in {row.id for row in node_rows()}
        and node_processes(node) == []
        and not node_folder(node.id).exists()
    )


def test_hosts_leave_nothing_whatever_happens(possible):
    def namespaces() -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in listed.splitlines()}

    seen: set[str] = set()

    def fails_among_them() -> None:
        with hosts(2) as there:
            seen.update({there[0].switch, *(host.namespace for host in there)})
            assert seen <= namespaces()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_among_them()
    assert len(seen) == 3
    assert not seen & namespaces()


def test_a_pool_over_three_hosts(spread):
    assert spread.scale(3) is True
    names = [node["name"] for node in spread.get_nodes()]
    assert len(names) == 3
    assert seen_by_ray(spread) == {name: hosts_backend.host_of(name).address for name in names}
    assert len({hosts_backend.host_of(name).address for name in names}) == 3


@pytest.mark.long
def test_a_link_is_cut_in_the_middle_of_a_job(spread, cut, tmp_path):
    spread.scale(3)
    handle = jobs.submit(endless(tmp_path))
    wait_until(lambda: any("eval-rmse" in line for line in handle.logs()), "the first rounds", 120)
    victim = node_rows()[-1]
    cut.append(hosts_backend.host_of(victim.name))
    cut[0].cut()

    with pytest.raises(JobFailedError, match=rf"rank 2 \(node {victim.name}.* was lost"):
        handle.wait(on_log=None)

    wait_until(lambda: gone(victim), "the end of the node that is out of reach", 60)
    wait_until(lambda: len(spread.get_nodes()) == 3, "the one in its place", 60)
    assert victim.name not in {node["name"] for node in spread.get_nodes()}
    wait_until(lambda: victim.name not in seen_by_ray(spread), "Ray to miss it")
    wait_until(lambda: not any(node.busy for node in spread.describe().active), "the gang's end")


@pytest.mark.long
def test_a_link_is_cut_in_the_middle_of_scaling(spread, cut):
    spread.scale(3)
    before = {row.id for row in node_rows()}
    joining: list[Node] = []

    def starting() -> list[Node]:
        return [row for row in node_rows() if row.id not in before and row.state is NodeState.STARTING]

    def cut_it() -> None:
        joining.extend(wait_until(starting, "a node that starts"))
        cut.append(hosts_backend.host_of(joining[0].name))
        cut[0].cut()

    cutter = threading.Thread(target=cut_it)
    cutter.start()
    with pytest.raises(ScaleError, match="rolled back to 3") as error:
        spread.scale(4, options={"rollback_after_seconds": 6})
    cutter.join()

    assert error.value.nodes == {joining[0].name: "starting still at the deadline"}
    assert gone(joining[0])
    assert {row.id for row in node_rows()} == before
    assert (spread.describe().target, len(spread.get_nodes())) == (3, 3)
    assert set(seen_by_ray(spread)) == {node["name"] for node in spread.get_nodes()}


def endless(folder: Path) -> JobSpec:
    """A training on three nodes that ends only when it is made to."""
    frame = pd.DataFrame({"a": np.random.default_rng(0).random(6_000)}).assign(y=lambda rows: rows["a"] * 3)
    frame.to_parquet(folder / "train.parquet", row_group_size=1_000)
    data = DataConnector.from_parquet(folder / "train.parquet")
    return JobSpec(
        dataset=data,
        input_cols=("a",),
        label_col="y",
        eval_set=data,
        n_estimators=10_000_000,
        params={"objective": "reg:squarederror"},
        verbose_eval=100,
        scaling_config=XGBScalingConfig(num_workers=3, num_cpu_per_worker=1),
        run_config=RunConfig(pool_name="hosts"),
    )
