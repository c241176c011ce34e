"""How local nodes find GPUs and divide them, on a machine that NVML's fake makes up. No GPU has seen this."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from shoal.errors import CapacityError, InvalidArgumentError, ScaleError
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.backends.local import gpus, raylet
from shoal.pool.backends.local.gpus import ALL, check_number, claim, visible_gpus
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Node
from shoal.training.host.usage import Meter
from tests.support import gpu_report
from tests.support.gpu_machine import RECORDINGS, Machine
from tests.support.homes import new_home
from tests.support.pool_processes import living, node_rows, nothing_left
from tests.support.waiting import wait_until

INIT = 1
"""A process of another user, unless the tests run as root."""


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> int:
    """The id of a process that belongs to another user."""
    monkeypatch.setattr(gpus, "_is_stranger", lambda pid: pid == INIT)
    return INIT


@pytest.fixture
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_non_nvidia_gpus", lambda environment: [])


def node(name: str) -> Node:
    return Node(id=f"{abs(hash(name)):010x}"[:10], name=name)


def found(visible: str | None = None) -> list[str]:
    return [gpu.id for gpu in visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})]


def test_the_callers_limit_is_kept_as_cuda_reads_it(gpu_machine: Machine, no_others: None) -> None:
    a, b, c = gpu_machine(3)
    for visible, expected in {
        None: [a, b, c],
        "2,0": [c, a],
        f"{b}, {a[:12]}": [b, a],
        "": [],
        "-1": [],
        "NoDevFiles": [],
        "1,7,0": [b],  # an unknown one ends the list
        "0,0,1": [a],  # and so does a repeated one
    }.items():
        assert found(visible) == expected, visible


def test_parts_count_instead_of_a_divided_gpu_and_a_lost_one_does_not(gpu_machine: Machine, no_others: None) -> None:
    a, _, _ = gpu_machine(3, parts={0: [], 1: ["MIG-1", "MIG-2"]}, lost=[2], pids={0: None})
    assert found() == [a, "MIG-1", "MIG-2"]
    assert found("MIG-2,0") == ["MIG-2", a]
    assert found("2,0") == [a]
    gpu_machine(2, driver=False)
    assert found() == []


def test_a_report_names_no_host_and_path_and_makes_the_same_machine(
    gpu_machine: Machine, no_others: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = gpu_machine(3, parts={1: ["MIG-00112233-0000-4000-8000-000000000001"]}, lost=[2], pids={0: [os.getpid()]})
    before = found()
    file = tmp_path / "report.json"
    monkeypatch.setattr(gpu_report, "versions", dict)  # imports torch
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    why = f"{tmp_path}/x.py s3://bucket/rows, ~/here: process 41 of ada at 10.1.2.3, node-7.example.com: {a} {c}"
    gpu_report.write(file, [{"test": "t", "why": why}])
    report = json.loads(file.read_text())
    assert report["tests"][0]["why"] == (
        "<path> <path>, <path>: process <number> of <name> at <address>, <name>: "
        f"{gpu_report.replaced('GPU', 0)} <UUID>"
    )
    assert not [hidden for hidden in (a, b, before[1], f'"pid": {os.getpid()}') if hidden in file.read_text()]
    assert report["gpus"][2] == "NVMLError_GpuIsLost"
    gpu_machine(report=file)
    [gpu, part] = visible_gpus({})
    assert (gpu.id, gpu.strangers, part.id[:4]) == (a, (gpu_report.FIRST_PID,), "MIG-")
    meter = Meter([gpu.id, part.id])
    assert [name for name in meter.measure() if name.startswith("gpu")] == ["gpu_0_utilization_percentage"]
    meter.close()
    for recording in RECORDINGS.glob("*.json"):
        gpu_machine(report=recording)
        assert found(), recording


def test_more_than_exist_are_refused_and_those_of_other_users_named(
    gpu_machine: Machine, no_others: None, another_user: int, recwarn: pytest.WarningsRecorder
) -> None:
    a, _ = gpu_machine(2, pids={0: [another_user, os.getpid()]})
    with pytest.raises(InvalidArgumentError, match="3 nodes with gpus_per_node=1 need 3 GPUs, but 2 GPUs of this mach"):
        check_number(1, 3, {})
    with pytest.raises(InvalidArgumentError, match=r"but 1 GPU of this machine .*, with CUDA_VISIBLE_DEVICES=1"):
        check_number(1, 2, {"CUDA_VISIBLE_DEVICES": "1"})
    check_number(1, 1, {})
    assert not recwarn
    with pytest.warns(UserWarning, match=f"processes use: {a} by process {another_user}$"):
        check_number(1, 2, {})


def test_a_gpu_is_never_in_two_claims(gpu_machine: Machine, no_others: None, another_user: int, tmp_path: Path) -> None:
    a, b, c = gpu_machine(3, pids={0: [another_user]})
    first = claim(1, node("p-0"), tmp_path)
    second = claim(ALL, node("q-0"), tmp_path)
    assert [gpu.id for gpu in first.gpus] == [b]  # that of the other user comes last
    assert [gpu.id for gpu in second.gpus] == [c, a]
    with pytest.raises(CapacityError, match=f"needs 1 GPU, but only 0 of this machine's 3 GPUs .*{b} by p-0"):
        claim(1, node("r-0"), tmp_path)
    assert claim(ALL, node("r-0"), tmp_path).gpus == ()
    first.release()
    with pytest.raises(CapacityError, match="needs 2 GPUs, but only 1 of"):
        claim(2, node("r-0"), tmp_path)
    assert [gpu.id for gpu in claim(1, node("r-0"), tmp_path).gpus] == [b]  # a claim that failed has left nothing


@pytest.mark.processes
def test_a_node_without_supervisor_keeps_its_gpu_until_its_processes_have_ended(
    gpu_machine: Machine, no_others: None, tmp_path: Path
) -> None:
    gpu_machine(1)
    lost = node("p-0")
    code = f"""
from pathlib import Path
from shoal.pool.backends.local.gpus import claim
from shoal.state.schema import Node
assert claim(1, Node(id={lost.id!r}, name="p-0"), Path({str(tmp_path)!r})).gpus
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # ends without a release, as after SIGKILL
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, NODE_TAG: lost.id}) as worker:
        with pytest.raises(CapacityError, match="by p-0"):
            claim(1, node("q-0"), tmp_path)
        worker.kill()
    assert claim(1, node("q-0"), tmp_path).gpus


def test_gpus_of_other_makers_are_those_that_ray_knows(
    gpu_machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Manager:
        """As Ray's for AMD."""

        @staticmethod
        def get_visible_accelerator_ids_env_var() -> str:
            return "HIP_VISIBLE_DEVICES"

        @staticmethod
        def get_current_process_visible_accelerator_ids() -> list[str] | None:
            return os.environ["HIP_VISIBLE_DEVICES"].split(",") if "HIP_VISIBLE_DEVICES" in os.environ else None

        @staticmethod
        def get_current_node_num_accelerators() -> int:
            return 3

        @staticmethod
        def set_current_process_visible_accelerator_ids(ids: list[str]) -> None:
            os.environ["HIP_VISIBLE_DEVICES"] = ",".join(ids)

    gpu_machine(0)
    monkeypatch.setattr(raylet, "get_accelerator_manager_for_resource", lambda _: Manager)
    assert [gpu.id for gpu in visible_gpus({})] == ["0", "1", "2"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,5")
    mine = claim(ALL, node("p-0"), tmp_path)
    assert [gpu.id for gpu in mine.gpus] == ["2"]
    mine.show_only_these()
    assert os.environ["HIP_VISIBLE_DEVICES"] == "2"
    mine.release()


def test_all_is_for_local_pools_only() -> None:
    assert PoolSpec.parse("local://p?gpus_per_node=-1").gpus_per_node == ALL
    with pytest.raises(InvalidArgumentError, match="gpus_per_node=-1 is allowed only for local"):
        PoolSpec.parse("ray://p?address=http://h:8265&gpus_per_node=-1")


def seen_by_nodes() -> dict[str, set[str]]:
    """What each node's processes have in CUDA_VISIBLE_DEVICES, the supervisor aside, by the node's id."""
    seen: dict[str, set[str]] = {}
    for process in living():
        variables = dict(entry.decode().partition("=")[::2] for entry in process.environment if entry)
        if b"sleep" in process.command and NODE_TAG in variables:
            seen.setdefault(variables[NODE_TAG], set()).add(variables.get("CUDA_VISIBLE_DEVICES", "all"))
    return seen


def of_pool(name: str) -> list[set[str]]:
    with Store().reading() as session:
        ids = session.scalars(select(Node.id).where(Node.pool == name).order_by(Node.name)).all()
    return [seen_by_nodes()[node_id] for node_id in ids]


@pytest.mark.processes
def test_the_pools_of_all_stores_divide_the_gpus(tiny: Path, gpu_machine: Machine, monkeypatch) -> None:
    a, b, c = gpu_machine(3)
    with pytest.raises(InvalidArgumentError, match="need 4 GPUs, but 3 GPUs"):
        ComputePool("local://many?min_nodes=2&gpus_per_node=2").up()
    assert node_rows() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    mine = ComputePool("local://mine?gpus_per_node=1&max_nodes=3").up()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # another process of this user, whose environment does not matter
    mine.scale(2)
    assert of_pool("mine") == [{c}, {a}]
    with pytest.raises(InvalidArgumentError, match="with CUDA_VISIBLE_DEVICES=2,0"):
        mine.scale(3)
    plain = ComputePool("local://plain").up()
    assert of_pool("plain") == [{""}]
    with new_home():
        rest = ComputePool("local://rest?gpus_per_node=-1").up()
        assert (of_pool("rest"), rest.get_nodes()[0]["gpus"]) == ([{b}], 1)
        with pytest.raises(ScaleError, match=rf"(?s)CapacityError: the node needs 1 GPU, but only 0 .*{c} by mine-0"):
            ComputePool("local://late?gpus_per_node=1").up()
        rest.down()
        nothing_left()
    # A killed supervisor: the node that replaces it gets the GPU, when the processes of the lost one have ended.
    lost = node_rows()[1]
    supervisor = ProcessId.from_json(lost.supervisor or {})
    supervisor.signal(signal.SIGKILL)
    wait_until(lambda: not supervisor.alive(), "its end")
    mine.scale(2)
    wait_until(lambda: lost.id not in seen_by_nodes() and len(of_pool("mine")) == 2, "the node that replaces it")
    assert of_pool("mine") == [{c}, {a}]
    plain.down()
