"""The environment of a worker: torchrun's own variables, so that code that runs under it runs here unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker says of where it is.

    Args:
        node: Name of its node.
        address: Address of its node.
        gpus: The GPUs that it was given, as CUDA_VISIBLE_DEVICES has them.
        port: Where its store for the rendezvous listens; rank 0 alone has one.
    """

    node: str
    address: str
    gpus: tuple[str, ...] = ()
    port: int = 0


def environments(
    machines: Sequence[Machine], *, threads: int, restarts: int, max_restarts: int
) -> list[dict[str, str]]:
    """What each rank's environment has beside its own.

    Args:
        machines: Where each rank is, by rank; those on one node follow one another.
        threads: Threads of each worker.
        restarts: How often the training was restarted.
        max_restarts: How often it may be.

    Returns:
        Variables by rank.
    """
    nodes = list(dict.fromkeys(machine.node for machine in machines))
    on_node = Counter(machine.node for machine in machines)
    first, world = machines[0], len(machines)
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(on_node[machine.node]),
            "GROUP_RANK": str(nodes.index(machine.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "TORCHELASTIC_RUN_ID": "shoal",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            # The store is there already: rank 0 is a client of it like all others, and no port is raced for.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(threads),
            **_visible_gpus(machines, machine.node),
        }
        for rank, (local, machine) in enumerate(_with_local_ranks(machines))
    ]


def _with_local_ranks(machines: Sequence[Machine]) -> Iterator[tuple[int, Machine]]:
    seen: Counter[str] = Counter()
    for machine in machines:
        yield seen[machine.node], machine
        seen[machine.node] += 1


def _visible_gpus(machines: Sequence[Machine], node: str) -> dict[str, str]:
    """All of the gang's GPUs on the node, in the order of local ranks: ``cuda:{LOCAL_RANK}`` is each worker's own."""
    gpus = [gpu for machine in machines if machine.node == node for gpu in machine.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
