"""Running a function, or a script, in every worker of a gang on the Ray cluster that this process is connected to.

Each attempt is a gang of its own: user code leaves modules, threads and devices behind that a next run must not find.
Where a worker or its node is lost, another gang calls the function again, which goes on from its checkpoint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from shoal.data.connector import DataConnector
from shoal.errors import DataError, InvalidArgumentError, MissingExtraError
from shoal.training import cluster
from shoal.training.gang.gang import WAIT_SECONDS, Gang, GangShape
from shoal.training.pytorch.checkpoints import Checkpoints
from shoal.training.pytorch.environment import environments
from shoal.training.pytorch.model_dir import Destination, shared_out
from shoal.training.pytorch.progress import Metrics, OnMetrics
from shoal.training.pytorch.request import FunctionRequest, FunctionResult, RankStats
from shoal.training.pytorch.scaling import lay_out
from shoal.training.resilience import Resilience


def run(
    request: FunctionRequest,
    program: bytes,
    *,
    job_id: str,
    location: str,
    env: Mapping[str, str] | None = None,
    on_metrics: OnMetrics | None = None,
) -> FunctionResult:
    """Calls a function in every worker, and waits for all.

    Args:
        request: Where, and with what.
        program: The function and its arguments, as :meth:`Program.dumps` has them.
        job_id: What the model's folder and the checkpoints are called.
        location: Directory or URI for them, which all nodes reach.
        env: Environment variables for the workers, credentials among them; they pass from process to process and are
            stored nowhere.
        on_metrics: Called with the metrics that workers log, while they run.

    Returns:
        What each rank returned, and what the run took.

    Raises:
        InvalidArgumentError: If this process is not connected to Ray.
        DataError: If a dataset cannot be used.
        CapacityError: If the active nodes cannot hold the workers, or did not within the deadline.
        TrainingError: If a rank raised: the first to do so, with its traceback in the notes.
        WorkerLostError: If a worker or its node was lost more often than `max_restarts` allows.
        MissingExtraError: If PyTorch or Ray is not installed.
    """
    began = time.monotonic()
    if not cluster.is_connected():
        raise InvalidArgumentError("this process is not connected to a Ray cluster: call ray.init(address=...) first")
    _require_torch()
    checkpoints = Checkpoints(f"{location.rstrip('/')}/checkpoints/{job_id}")
    attempts = _Run(request, program, checkpoints, Destination(location, job_id), dict(env or {}), on_metrics, began)
    return attempts.result()


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "torch")


class _Run:
    def __init__(
        self,
        request: FunctionRequest,
        program: bytes,
        checkpoints: Checkpoints,
        destination: Destination,
        env: dict[str, str],
        on_metrics: OnMetrics | None,
        began: float,
    ) -> None:
        self._request = request
        self._program = program
        self._env = env
        self._began = began
        self._resilience = Resilience(request.run_config, began)
        self._layout = lay_out(request.scaling, cluster.active_nodes(), clamp=request.run_config.clamp)
        if request.room_for:
            lay_out(request.room_for, cluster.active_nodes(), clamp=request.run_config.clamp)
        self._checkpoints = checkpoints
        self._destination = destination
        self._metrics = Metrics(on_metrics)
        _check_data(request, self._layout.num_workers)

    def result(self) -> FunctionResult:
        """Run to the end, going on from the last checkpoint after each loss."""
        self._checkpoints.remove()
        try:
            with self._metrics:
                return self._resilience.run(self._attempt, checkpoint=self._whence, make_do=self._make_do)
        finally:
            self._checkpoints.remove()

    def _attempt(self) -> FunctionResult:
        from shoal.training.pytorch import worker

        request, layout = self._request, self._layout
        each = layout.each
        shape = GangShape(layout.num_workers, each.num_cpus, each.num_gpus, each.gpu_type, per_node=layout.per_node)
        left = self._resilience.left(WAIT_SECONDS)
        gang = Gang.start(shape, timeout=min(WAIT_SECONDS, left), env=self._env)
        try:
            nothing: list[tuple[Any, ...]] = [()] * layout.num_workers
            machines = gang.run(worker.meet, nothing, timeout=self._resilience.timeout)
            threads = max(1, each.num_cpus)
            places = environments(
                machines,
                threads=threads,
                restarts=self._resilience.restarts,
                max_restarts=request.run_config.max_restarts,
            )
            assignment = worker.Assignment(
                program=self._program,
                dataset_map=request.dataset_map,
                hyper_params=request.hyper_params,
                checkpoints=self._checkpoints.folder,
                threads=threads,
                seed=request.run_config.seed,
            )
            outcomes: list[worker.Outcome] = gang.run(
                partial(worker.call, assignment),
                list(zip(machines, places, strict=True)),
                timeout=self._resilience.timeout,
                on_note=self._metrics.note,
            )
            model_dir = self._publish(gang, [outcome.files for outcome in outcomes])
            workers = tuple(
                RankStats(info.rank, info.node, outcome.peak_rss_bytes)
                for info, outcome in zip(gang.workers, outcomes, strict=True)
            )
        finally:
            gang.end()
        return FunctionResult(
            results=tuple(outcome.value for outcome in outcomes),
            metrics=self._metrics.last,
            model_dir=model_dir,
            num_workers=layout.num_workers,
            restarts=self._resilience.restarts,
            seconds=time.monotonic() - self._began,
            workers=workers,
        )

    def _publish(self, gang: Gang, files: Sequence[Mapping[str, str]]) -> str:
        """Have the ranks upload their files, each one once; what an earlier run has left stays until then."""
        from shoal.training.pytorch import worker

        destination = self._destination
        parts = shared_out(files)
        destination.prepare()
        try:
            gang.run(worker.upload, [(part, destination.staging) for part in parts], timeout=self._resilience.timeout)
            return destination.commit(path for part in parts for path in part)
        except BaseException:
            destination.discard()
            raise

    def _whence(self) -> str:
        number = self._checkpoints.latest()
        return "the beginning, because there is no checkpoint" if number is None else f"checkpoint {number}"

    def _make_do(self) -> str | None:
        """Go on on fewer nodes, if that is allowed."""
        least = self._request.run_config.min_workers
        if least is None:
            return None
        with warnings.catch_warnings(action="ignore"):
            layout = lay_out(self._request.scaling, cluster.active_nodes(), clamp=True)
        if not least <= layout.num_workers < self._layout.num_workers:
            return None
        self._layout = layout
        return f"{layout.num_workers} workers"


def _check_data(request: FunctionRequest, workers: int) -> None:
    """Refuse what footers show: a missing or corrupt file, fewer rows than workers."""
    for name, spec in request.dataset_map.items():
        connector = DataConnector.from_spec(spec)
        try:
            rows = connector.num_rows()
        except DataError as error:
            raise DataError(f'dataset "{name}": {error}') from error
        if rows == 0 or (connector.sharded and rows < workers):
            raise DataError(f'dataset "{name}" has {rows} rows for {workers} workers')
