"""Predict for several sizes of a pool whether a boosting training fits into the memory of its nodes, from the footers
of its files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from shoal.data.connector import DataConnector
from shoal.errors import CapacityError
from shoal.training.boosting.library import library_of
from shoal.training.boosting.messages import Task
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.rows import check_columns, shard_datasets
from shoal.training.boosting.worker_fit import advice, fit_worker
from shoal.training.cluster import Node
from shoal.training.gang.placement import GangShape
from shoal.training.sizing.constants import IDLE_BYTES
from shoal.training.sizing.node_memory import NodeMemory
from shoal.training.sizing.plan import MARGIN, PlannedSize, TrainingPlan, tried_sizes


class Learned(NamedTuple):
    """What earlier trainings of a model have measured.

    Args:
        idle_bytes: Memory of a worker that has read nothing; 0: that of the constants.
        scale: Factor of the predicted memory above it.
    """

    idle_bytes: float = 0.0
    scale: float = 1.0


NOTHING_LEARNED = Learned()


def plan_training(
    request: TrainRequest,
    node: NodeMemory,
    train: DataConnector | None = None,
    *,
    cpus: int,
    most_nodes: int,
    learned: Learned = NOTHING_LEARNED,
) -> TrainingPlan:
    """Predict the memory of a training for 1, 2, 4 … nodes, for the largest number of nodes, and for those between from
    which the smallest on which it fits is found.

    Args:
        request: The training. It is planned for CPUs.
        node: Memory of each node.
        train: The training set, if it was opened before.
        cpus: CPUs of each node.
        most_nodes: Largest number of nodes.
        learned: What earlier trainings of the model have measured.

    Raises:
        CapacityError: The workers fit on no such number of nodes.
        DataError: The footers show an error.
    """
    claim = request.scaling_config.gang(use_gpu=False)
    cluster = [Node(name="", cpus=cpus, gpus=0)] * most_nodes
    train = train or DataConnector.from_spec(request.dataset)
    planner = _Planner(request, node, claim.size(cluster), learned, train)
    rows, counts = train.num_rows(), tried_sizes(most_nodes)
    plan = TrainingPlan(request.framework, rows, len(request.input_cols), node, (), learned.scale)
    tried: set[int] = set()
    while counts:
        nodes = counts.pop(0)
        tried.add(nodes)
        with suppress(CapacityError):
            shape = claim.size(cluster[:nodes])
            # If no size has few enough workers, the largest one raises the error of the training.
            if shape.num_workers <= max(1, rows) or (nodes == most_nodes and not plan.sizes):
                sizes = *plan.sizes, planner.planned(nodes, shape)
                plan = replace(plan, sizes=tuple(sorted(sizes, key=lambda size: size.nodes)))
        if not counts and (chosen := plan.chosen) is not None:
            # Halve the gap below the chosen size, until no number of nodes is between it and a smaller one.
            between = (chosen.nodes + max((each for each in tried if each < chosen.nodes), default=0)) // 2
            counts = [between] if between and between not in tried else []
    return plan


class _Planner:
    def __init__(
        self, request: TrainRequest, node: NodeMemory, largest: GangShape, learned: Learned, train: DataConnector
    ) -> None:
        self.request, self.node, self.learned, self.train = request, node, learned, train
        check_columns(request, train)
        self.eval_sets = {
            name: train if spec == request.dataset else DataConnector.from_spec(spec)
            for name, spec in request.eval_set.items()
        }
        library = library_of(request.framework)
        self.joins = node.is_shared and library.joins_workers(request, UserCode(), train.num_rows())
        # The parameters on which memory depends are the same for all sizes.
        shape = largest.as_one_worker() if self.joins else largest
        self.params, self.seed = library.params(request, shape, UserCode())

    def planned(self, nodes: int, shape: GangShape) -> PlannedSize:
        workers, framework = 1 if self.joins else shape.num_workers, self.request.framework
        room = self.node.room(workers, nodes)
        task, scale = self._task(workers), self.learned.scale
        idle = int(self.learned.idle_bytes) or IDLE_BYTES[framework]
        room_above = int((room - MARGIN * idle) / scale)
        found = fit_worker(framework, task, room_above, workers=workers, all_rows=self.train.num_rows())
        terms = {"idle process": idle, **{name: int(size * scale) for name, size in found.memory.terms().items()}}
        return PlannedSize(
            nodes=nodes,
            workers=workers,
            rows=task.train.shard.rows,
            peak_bytes=idle + int(found.memory.above_idle * scale),
            room_bytes=room,
            verdict=found.verdict,
            terms=terms,
            disk_bytes=found.disk_bytes,
            advice=advice(framework, task, found) if found.verdict == "no" else "",
        )

    def _task(self, workers: int) -> Task:
        """Return the task of rank 0, which needs the most memory."""
        request, params, library, user_code = self.request, self.params, library_of(self.request.framework), UserCode()
        rows = sum(dataset.num_rows() for dataset in (self.train, *self.eval_sets.values()))
        by_columns = workers > 1 and library.splits_columns(request, params, user_code, rows)
        whole = workers > 1 and not by_columns and bool(library.whole_metrics(request, params, user_code))
        # Rows of a group stay together, which changes the sizes of shards little; to find the groups would take a read.
        split = {"by_columns": by_columns, "whole": whole}
        [(part, evals), *_] = shard_datasets(self.train, self.eval_sets, workers, self.seed, None, **split)
        # The categories are in the rows: as many are assumed as there are bins.
        categories = dict.fromkeys(request.categorical_cols, range(int(params.get("max_bin") or 256)))
        columns = replace(request.columns, categories=categories)
        return Task(part, evals, columns, params, external_memory=request.external_memory, by_columns=by_columns)
