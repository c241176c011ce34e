"""Run the workers of a gang as processes that the driver starts on the nodes of a local pool.

All nodes of such a pool are on the driver's machine. Ray reserves the CPUs of the workers and chooses their nodes, so
that neither Ray's tasks nor other trainings use these CPUs, but does not start the workers: the driver forks them from
a template, which has imported the library. On a pool without Ray, the driver reserves the CPUs in the pool's register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.errors import WorkerLostError
from shoal.node_register import NodeRegister
from shoal.training.gang import placement
from shoal.training.gang.child_processes import ChildProcesses, has_template
from shoal.training.gang.local_node import LocalNode, NodeWithoutRay
from shoal.training.gang.placement import GangShape
from shoal.training.gang.register_placement import reserve_in_register

FindNodes = Callable[[], Mapping[str, LocalNode]]
"""Type of a function that finds the running nodes of the pool, by name."""

_find_nodes: FindNodes | None = None


def use_nodes(find: FindNodes) -> None:
    """Make this process start its workers itself on the nodes that `find` returns."""
    global _find_nodes
    _find_nodes = find


def finder(shape: GangShape) -> FindNodes | None:
    """Return the function that finds the nodes on which this process starts the workers of a gang itself; None if Ray
    starts the workers.

    Workers with GPUs are started by Ray, because Ray chooses their GPUs when it starts them.
    """
    return _find_nodes if has_template() and not shape.gpus_per_worker else None


class NodeProcesses(ChildProcesses):
    """Workers that are child processes of this process and belong to the nodes on which Ray has reserved their CPUs.

    Args:
        shape: Number and size of the workers.
        deadline: Time until which to wait for resources that are in use, from `time.monotonic`.
        find: Function that finds the nodes.

    Raises:
        CapacityError: The active nodes are too small for the gang, or had no free room in time.
        WorkerLostError: A node has ended.
    """

    def __init__(self, shape: GangShape, deadline: float, find: FindNodes) -> None:
        self._group = placement.reserve(shape, deadline)
        try:
            seats, nodes = placement.seats(shape, self._group), find()
            for rank, seat in enumerate(seats):
                if seat.node not in nodes:
                    raise WorkerLostError(f"rank {rank} could not be started, because node {seat.node} was lost")
            super().__init__(shape, seats, nodes)
        except BaseException:
            placement.release(self._group)
            raise

    def kill(self) -> None:
        """Kill the processes, wait until they have ended, and free their CPUs."""
        super().kill()
        placement.release(self._group)


class ProcessesWithoutRay(ChildProcesses):
    """Workers that are child processes of this process, on the nodes of a pool without Ray.

    Args:
        shape: Number and size of the workers.
        deadline: Time until which to wait for CPUs that are in use, from `time.monotonic`.
        register: Register of the pool's nodes.

    Raises:
        CapacityError: The active nodes are too small for the gang, or had no free room in time.
    """

    def __init__(self, shape: GangShape, deadline: float, register: NodeRegister) -> None:
        self._reservation = reserve_in_register(shape, register, deadline)
        nodes = {node.name: NodeWithoutRay(register.folder, node) for node in self._reservation.nodes}
        super().__init__(shape, self._reservation.seats, nodes)

    def kill(self) -> None:
        """Kill the processes, wait until they have ended, and free their CPUs."""
        super().kill()
        self._reservation.release()
