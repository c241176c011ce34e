"""CPUs of nodes without Ray: reserved for all workers of a gang or for none, and free when their driver has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import CapacityError, CapacityTimeoutError
from shoal.node_register import NodeRegister, Registration
from shoal.training import cluster
from shoal.training.gang.gang import Gang
from shoal.training.gang.placement import GangShape, choose, reserve_in_register
from tests.support.without_ray import nodes_without_ray, registered


@pytest.fixture
def register(tmp_path: Path) -> NodeRegister:
    return NodeRegister(NodeRegister.path_in(tmp_path))


@pytest.fixture
def nodes(register: NodeRegister, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Registration]]:
    """A head and another node with two CPUs each."""
    made = [registered(register, number, 2) for number in range(2)]
    monkeypatch.setattr(cluster, "_register", register)
    yield made
    for each in made:
        each.remove()


def soon() -> float:
    return time.monotonic() + 0.1


@pytest.mark.parametrize(
    ("shape", "free", "expected"),
    [
        (GangShape(2, 1.0), [2, 2], [0, 1]),
        (GangShape(3, 1.0), [1, 3], [0, 1, 1]),
        (GangShape(2, 2.0), [3, 3], [0, 1]),
        (GangShape(2, 2.0), [3, 1], None),
        (GangShape(2, 0.5), [0, 0], [0, 1]),
        (GangShape(4, 1.0, per_node=2), [1, 2, 4], [1, 2]),
        (GangShape(4, 1.0, per_node=2), [4, 1], None),
    ],
    ids=str,
)
def test_workers_are_spread_over_the_nodes_that_have_room(
    shape: GangShape, free: list[int], expected: list[int] | None
) -> None:
    assert choose(shape, free) == expected


def test_a_gang_reserves_all_its_cpus_or_none_until_it_is_released(
    register: NodeRegister, nodes: list[Registration]
) -> None:
    with pytest.raises(CapacityError, match=r"5 workers .* room for 4 of them \(2 nodes, 4 CPUs\)"):
        reserve_in_register(GangShape(5, 1.0), register, soon())
    first = reserve_in_register(GangShape(3, 1.0), register, soon())
    assert [(seat.node, seat.local_world_size) for seat in first.seats] == [("here", 2), ("here", 2), ("here-1", 1)]
    with pytest.raises(CapacityTimeoutError, match="1 of 4 CPUs are free"):
        reserve_in_register(GangShape(2, 1.0), register, soon())
    assert [node.is_in_use() for node in nodes] == [True, True]
    first.release()
    assert [node.is_in_use() for node in nodes] == [False, False]
    second = reserve_in_register(GangShape(2, 2.0), register, soon())
    assert cluster.free_and_all_cpus() == (0, 4)
    second.release()


def test_the_kernel_frees_what_a_killed_driver_or_supervisor_had(
    register: NodeRegister, nodes: list[Registration]
) -> None:
    script = """if True:
        import sys, time
        from pathlib import Path
        from shoal.node_register import NodeRegister
        from shoal.training import cluster
        from shoal.training.gang.placement import GangShape
        from shoal.training.gang.placement import reserve_in_register
        from tests.support.without_ray import registered
        register = NodeRegister(Path(sys.argv[1]))
        cluster.use_register(register)
        kept = [registered(register, 2, 8), reserve_in_register(GangShape(3, 1.0), register, time.monotonic() + 9)]
        print(*(node.name for node in register.nodes()), flush=True)
        input()
    """
    command = [sys.executable, "-c", script, str(register.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["here", "here-1", "here-2"]
        assert [node.is_in_use() for node in nodes] == [True, True]
        assert cluster.free_and_all_cpus() == (9, 12)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert cluster.free_and_all_cpus() == (4, 4)
    assert [node.name for node in register.nodes()] == ["here", "here-1"]
    nodes.append(registered(register, 3, 1))
    assert len(list(register.folder.iterdir())) == 3, "the file of the lost node is left"


def test_a_node_that_will_shut_down_gets_no_workers_and_a_gang_can_move_from_it(tmp_path: Path) -> None:
    with nodes_without_ray(1, 1) as register:
        gang = Gang.start(GangShape(1, 1.0))
        assert gang.workers[0].node == "here"
        assert gang.run(os.getenv, [("SHOAL_NODE_ID",)]) == ["id-0"]
        assert gang.can_move_from() == []
        (register.folder / "id-0.leaving").touch()
        assert cluster.leaving_nodes() == {"id-0"}
        assert gang.run(cluster.leaving_nodes, [()]) == [{"id-0"}], "the workers do not know"
        assert gang.can_move_from() == ["here"]
        gang.end()
        again = reserve_in_register(GangShape(1, 1.0), register, soon())
        assert [seat.node for seat in again.seats] == ["here-1"]
        again.release()
