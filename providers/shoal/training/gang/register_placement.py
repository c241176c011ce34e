"""Place the workers of a gang on the nodes of a pool without Ray, and reserve their CPUs in the pool's register."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence

from shoal.node_register import NodeRegister, RegisteredNode
from shoal.training.gang.placement import GangShape, Seat, refuse_if_impossible, wait_for_room

_LOOK_PERIOD_S = 0.1


class Reservation:
    """Reserved CPUs of a gang.

    Args:
        seats: Placement of each worker, by rank.
        nodes: The nodes of the seats.
        descriptors: Descriptors that keep the CPUs reserved while they are open.
    """

    def __init__(self, seats: Sequence[Seat], nodes: Sequence[RegisteredNode], descriptors: Sequence[int]) -> None:
        self.seats = seats
        self.nodes = nodes
        self._descriptors = list(descriptors)

    def release(self) -> None:
        """Free the CPUs; further calls have no effect."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def reserve_in_register(shape: GangShape, register: NodeRegister, deadline: float) -> Reservation:
    """Reserve the CPUs of all workers together; if one worker does not fit, reserve none.

    Raises:
        CapacityError: The active nodes are too small for the gang.
        CapacityTimeoutError: The nodes had no free room before the deadline.
    """
    refuse_if_impossible(shape)
    made: list[Reservation] = []

    def reserved(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (reservation := _try_to_reserve(shape, register)) is None:
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LOOK_PERIOD_S))
        made.append(reservation)
        return True

    wait_for_room(shape, reserved, deadline)
    return made[0]


def choose(shape: GangShape, free: Sequence[int]) -> list[int] | None:
    """Choose a node for each group of workers that share a node (for each worker, if `per_node` is None). The groups
    are spread over the nodes, as Ray spreads them; with `per_node`, each gets a node of its own.

    Args:
        shape: Number and size of the workers.
        free: Number of free CPUs of each node.

    Returns:
        The index of the node for each group, in ascending order; None if the free CPUs do not suffice.
    """
    each = int(shape.cpus_per_worker) * (shape.per_node or 1)
    on_node = [0] * len(free)
    for _ in shape.bundles:
        fitting = [
            node
            for node, cpus in enumerate(free)
            if cpus >= each * (on_node[node] + 1) and not (shape.per_node and on_node[node])
        ]
        if not fitting:
            return None
        on_node[min(fitting, key=lambda node: (on_node[node], node))] += 1
    return [node for node, number in enumerate(on_node) for _ in range(number)]


def _try_to_reserve(shape: GangShape, register: NodeRegister) -> Reservation | None:
    with register.reserving() as mine:
        if not mine:
            return None
        nodes = [node for node in register.nodes() if not register.is_leaving(node.id)]
        chosen = choose(shape, [register.free_cpus(node) for node in nodes])
        if chosen is None:
            return None
        together = shape.per_node or 1
        on_node = Counter(chosen)
        descriptors: list[int] = []
        for node, bundles in on_node.items():
            descriptor = register.reserve(nodes[node], int(shape.cpus_per_worker) * together * bundles)
            if descriptor is None:  # the node has just ended
                Reservation([], [], descriptors).release()
                return None
            descriptors.append(descriptor)
    seats = [
        Seat(bundle, nodes[node].id, nodes[node].name, on_node[node] * together)
        for bundle, node in enumerate(chosen)
        for _ in range(together)
    ]
    return Reservation(seats, [nodes[node] for node in on_node], descriptors)
