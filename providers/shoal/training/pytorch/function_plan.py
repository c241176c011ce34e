"""Predict for several sizes of a pool whether the workers of a function fit into the memory of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.connector import DataConnector
from shoal.data.numpy_columns import dtype_of
from shoal.data.shuffling import row_bytes, rows_of, shuffled_windows
from shoal.errors import CapacityError
from shoal.training.cluster import Node
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.sizing.constants import IDLE_BYTES
from shoal.training.sizing.node_memory import NodeMemory
from shoal.training.sizing.plan import PlannedSize, TrainingPlan, tried_sizes, verdict_of

_NO_MODEL = (
    ". The memory of the model, and of workers of a DataLoader, is not in it: give memory_per_worker, or run the "
    "function once"
)


def plan_function(
    request: FunctionRequest, node: NodeMemory, known_bytes: int, *, cpus: int, most_nodes: int
) -> TrainingPlan:
    """Predict the memory of a function's workers for 1, 2, 4 … nodes, and for the largest number of nodes.

    Args:
        request: The function. Its datasets count as shuffled, with all their columns.
        node: Memory of each node.
        known_bytes: Memory of each worker with its model; 0 if it is not known.
        cpus: CPUs of each node.
        most_nodes: Largest number of nodes.

    Raises:
        CapacityError: The workers fit on no such number of nodes.
    """
    inputs = [DataConnector.from_spec(each) for each in request.dataset_map.values()]
    sizes = []
    for nodes in tried_sizes(most_nodes):
        try:
            shape = request.demand().size([Node(name="", cpus=cpus, gpus=0)] * nodes, clamp=False)
        except CapacityError:
            if nodes == most_nodes:
                raise
            continue
        sizes.append(_planned(inputs, node, known_bytes, nodes, shape.num_workers))
    rows, columns = sum(each.num_rows() for each in inputs), sum(len(each.schema()) for each in inputs)
    return TrainingPlan("pytorch", rows, columns, node, tuple(sizes), note="" if known_bytes else _NO_MODEL)


def _planned(
    inputs: Sequence[DataConnector], node: NodeMemory, known_bytes: int, nodes: int, workers: int
) -> PlannedSize:
    shuffled = sum(_shuffled_bytes(each, workers) for each in inputs)
    terms = {"idle process": IDLE_BYTES["pytorch"], "shuffled rows": shuffled}
    terms["model"] = max(0, known_bytes - sum(terms.values()))
    peak, room = sum(terms.values()), node.room(workers, nodes)
    return PlannedSize(
        nodes=nodes,
        workers=workers,
        rows=max((each.num_rows() // (workers if each.sharded else 1) for each in inputs), default=0),
        peak_bytes=peak,
        room_bytes=room,
        verdict=verdict_of(peak, room),
        terms=dict(sorted(terms.items(), key=lambda term: -term[1])),
        advice="use larger nodes or fewer workers on each",
    )


def _shuffled_bytes(dataset: DataConnector, workers: int) -> int:
    """Return the size of the rows that a worker shuffles together."""
    dtypes = {field.name: dtype for field in dataset.schema() if (dtype := dtype_of(field.type)) is not None}
    size = row_bytes(dataset.source, dtypes)
    ranges = dataset.plan(workers, seed=0)[0].ranges if dataset.sharded else dataset.source.ranges()
    return max((rows_of(window) * size for window in shuffled_windows(ranges, size)), default=0)
