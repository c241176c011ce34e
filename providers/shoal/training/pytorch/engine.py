"""Run a function or script in several workers (a gang), in a Ray cluster or on this machine without Ray.

A gang is the group of workers of one run. Each attempt starts a new gang, because modules, threads and GPU memory that
user code leaves in a process must not affect the next run. If a worker or its node is lost, a new gang calls the
function again, and the function continues from its checkpoint.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from shoal.data.connector import DataConnector
from shoal.errors import DataError, MissingExtraError, ShoalError
from shoal.lazy_imports import cloudpickle
from shoal.training import cluster, locations
from shoal.training.gang.child import TORCH_MODULES
from shoal.training.gang.child_processes import import_ahead
from shoal.training.gang.gang import Gang, end_gangs
from shoal.training.host.usage import NodeMetrics
from shoal.training.locations import Claim
from shoal.training.pytorch import worker
from shoal.training.pytorch.checkpoints import Checkpoints, Destination, shared_out
from shoal.training.pytorch.request import FunctionRequest, FunctionResult, MissingValue, RankStats
from shoal.training.pytorch.worker import environments
from shoal.training.reporting import MetricSink, OnProgress, Progress, ProgressDisplay, say
from shoal.training.run_config import Restarts, fewer_workers

_LOST_FILES_SHOWN = 5


def import_ahead_for_workers(request: FunctionRequest) -> None:
    """Import PyTorch in the template of the workers, while this process does other things."""
    if not request.is_launcher:
        import_ahead(request.demand().resolved, TORCH_MODULES, complete=True)


@dataclass
class Run:
    """Run of a function in every worker; the constructor checks the location and the datasets.

    If the workers' working folder is removed after the run (`loses_folder`), what a script has written into it is kept
    in the model folder, or a line names the files.

    Raises:
        InvalidArgumentError: This process is not connected to Ray, the location cannot be written to, or the run must
            not replace the model folder or the checkpoint folder.
        DataError: A dataset cannot be used.
        CapacityError: The active nodes are too small for the workers.
        MissingExtraError: Ray is not installed, or PyTorch is not installed and the function runs on ranks.
    """

    request: FunctionRequest
    program: bytes
    _: KW_ONLY
    claim: Claim
    location: str
    env: Mapping[str, str] | None = None
    sink: MetricSink | None = None
    on_progress: OnProgress | None = None
    on_note: Mapping[str, Callable[[int, Any], None]] = field(default_factory=dict)
    on_node: Callable[[str, dict[str, float]], None] | None = None
    may_publish: Callable[[], bool] = lambda: True
    loses_folder: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.restarts = Restarts(request.run_config)
        cluster.require_connection()
        if find_spec("torch") is None and not request.is_launcher:
            raise MissingExtraError("torch", "torch")
        location = locations.local_path(self.location)
        locations.try_out(location)
        self.destination = Destination(location, self.claim, self.may_publish)
        self.destination.check()
        folder = f"{location.rstrip('/')}/checkpoints/{self.claim.job_id}"
        self.checkpoints = Checkpoints(folder, secrets.token_bytes(32))
        self.claim.check(folder, shared=location)
        self.metrics = Metrics(self.sink, self.on_progress)
        demand = request.demand()
        self._shape = demand.resolved()
        for further in demand.also:
            further(cluster.active_nodes(), clamp=request.run_config.clamp)
        _check_data(request, self._shape.num_workers)

    def result(self) -> FunctionResult:
        """Run the function to its end, publish the model folder, and return the result; if a worker is lost, restart
        from the last checkpoint.

        Raises:
            CapacityError: The active nodes had no free room in time.
            TrainingError: A rank raised an exception. The message names the rank that most likely caused the failure,
                and the notes contain its traceback.
            WorkerLostError: Workers or nodes were lost more often than `max_restarts` allows.
        """
        # See `train`: the folders of all checkpoints and of the job belong to shoal.
        self.claim.take(self.checkpoints.folder, shared=self.checkpoints.folder.rsplit("/", 2)[0])
        self._announce("Started")
        try:
            with self.metrics:
                result = self.restarts.run(self._attempt, checkpoint=self._resume_point, shrink=self._shrink)
        finally:
            try:
                self.claim.remove(self.checkpoints.folder)
            except (ShoalError, OSError) as error:
                say(f"the checkpoints in {self.checkpoints.folder} could not be removed: {error}")
        self._announce("Finished")
        return result

    def _announce(self, event: str) -> None:
        """Print the same line as PySpark at the start or the end of the training, if a `TorchDistributor` has created
        the request."""
        if mode := self.request.torch_distributor:
            processes = "processes" if mode == "local" else "executor processes"
            say(f"{event} {mode} training with {self._shape.num_workers} {processes}")

    def _attempt(self) -> FunctionResult:
        request, shape = self.request, self._shape
        # An idle gang of an earlier boosting run in this process still reserves CPUs. The workers, or Ray tasks that
        # the user's function starts, may need these CPUs.
        end_gangs()
        gang = Gang.start(shape, timeout=self.restarts.wait_s, env=self.env)
        self.metrics.continued()
        try:
            nodes_of_ranks = [(info.node_id, request.is_launcher) for info in gang.workers]
            machines = gang.run(worker.meet, nodes_of_ranks, timeout=self.restarts.timeout)
            if on_node := self.on_node:
                nodes = {machine.node: info.node for info, machine in zip(gang.workers, machines, strict=True)}
                gang.sidecar("node metrics", lambda _: NodeMetrics(nodes, on_node))
            places = environments(
                machines,
                threads=shape.threads,
                restarts=self.restarts.count,
                max_restarts=request.run_config.max_restarts,
                is_launcher=request.is_launcher,
            )
            assignment = worker.Assignment(
                program=self.program,
                dataset_map=request.dataset_map,
                hyper_params=request.hyper_params,
                checkpoints=self.checkpoints,
                threads=shape.threads,
                seed=request.run_config.seed,
                nodes=frozenset(info.node_id for info in gang.workers),
            )
            start_seconds = self.restarts.seconds
            outcomes: list[worker.Outcome] = gang.run(
                partial(worker.call, assignment),
                list(zip(machines, places, strict=True)),
                timeout=self.restarts.timeout,
                on_note=self._note,
            )
            files = self._files_of_ranks(gang, outcomes)
            model_dir = self._publish(gang, files)
            gang.finish(timeout=self.restarts.timeout)
        finally:
            gang.end()
        return FunctionResult(
            results=tuple(_loaded(outcome.value) for outcome in outcomes),
            metrics=self.metrics.last,
            model_dir=model_dir,
            num_workers=shape.num_workers,
            restarts=self.restarts.count,
            seconds=self.restarts.seconds,
            workers=tuple(
                RankStats(info.rank, info.node, outcome.peak_rss_bytes)
                for info, outcome in zip(gang.workers, outcomes, strict=True)
            ),
            start_seconds=start_seconds,
            model_files=len({name for found in files for name in found}),
        )

    def _files_of_ranks(self, gang: Gang, outcomes: Sequence[worker.Outcome]) -> list[dict[str, str]]:
        """Return the digests of each rank's model files; if the working folder will be removed, keep a script's files
        first, and name what is lost."""
        if not self.loses_folder:
            return [outcome.files for outcome in outcomes]

        kept = gang.run(worker.keep_written, [()] * len(outcomes), timeout=self.restarts.timeout)
        sizes = {name: size for _, lost in kept for name, size in lost.items()}
        if sizes:
            largest = sorted(sizes, key=lambda name: (-sizes[name], name))
            shown = ", ".join(largest[:_LOST_FILES_SHOWN]) + ", ..." * (len(largest) > _LOST_FILES_SHOWN)
            say(
                f"{len(sizes)} file{'s' * (len(sizes) > 1)} in the working folder ({sum(sizes.values()) / 1e6:,.1f} "
                f"MB: {shown}) will be removed with the job: write results into the model folder, whose path is in "
                "$SHOAL_MODEL_DIR and get_context().get_model_dir(), or to an absolute path that all nodes can reach"
            )
        return [digests for digests, _ in kept]

    def _note(self, rank: int, note: dict[str, Any]) -> None:
        """Handle a note (message) from a worker. A note contains metrics, the signatures of the checkpoints, or values
        for the functions in `on_note`."""
        if "checkpoints" in note:
            self.checkpoints.known_seals = {int(number): str(seal) for number, seal in note["checkpoints"].items()}
        elif "metrics" in note:
            self.metrics.note(rank, note)
        else:
            for key, value in note.items():
                if act := self.on_note.get(key):
                    act(rank, value)

    def _publish(self, gang: Gang, files: Sequence[Mapping[str, str]]) -> str:
        """Make the ranks upload their model files, each file only once, and publish the folder with these files.

        On a local disk, the old model stays in place until the new model is complete.
        """

        destination = self.destination
        parts = shared_out(files)
        destination.prepare()
        try:
            gang.run(worker.upload, [(part, destination.staging) for part in parts], timeout=self.restarts.timeout)
            return destination.commit(path for part in parts for path in part)
        except BaseException:
            destination.discard()
            raise

    def _resume_point(self) -> str:
        number = self.checkpoints.latest()
        return "the beginning, because there is no checkpoint" if number is None else f"checkpoint {number}"

    def _shrink(self) -> str | None:
        """Reduce the number of workers to the number that fits on the active nodes, if at least `min_workers` fit."""
        min_workers = self.request.run_config.min_workers
        fewer = fewer_workers(self._shape, min_workers, lambda: self.request.demand().resolved(clamp=True))
        self._shape = fewer or self._shape
        return None if fewer is None else f"{fewer.num_workers} workers"


def _loaded(value: bytes | MissingValue) -> Any:
    """Unpickle a return value. A value that cannot be unpickled here must not lose a finished training."""
    if isinstance(value, MissingValue):
        return value
    try:
        return cloudpickle.loads(value)
    except Exception as error:
        return MissingValue(f"the value cannot be unpickled in this process ({type(error).__name__}: {error})")


def _check_data(request: FunctionRequest, workers: int) -> None:
    """Check that each dataset can be read and has enough rows for the workers; only the Parquet footers are read."""
    for name, spec in request.dataset_map.items():
        connector = DataConnector.from_spec(spec)
        try:
            rows = connector.num_rows()
        except DataError as error:
            raise DataError(f'dataset "{name}": {error}') from error
        if rows == 0 or (connector.sharded and rows < workers):
            raise DataError(
                f'dataset "{name}" has {rows} rows, but the run has {workers} workers: a dataset must not be empty, '
                "and a sharded dataset needs at least one row per worker"
            )


class Metrics(ProgressDisplay):
    """Context manager that receives and displays the metrics of a run's ranks, and removes the display at the end.

    Args:
        metrics: Receiver of the metrics of all ranks, or None.
        on_progress: Function to call with the step and the last metrics of rank 0, or None.

    Attributes:
        last: Last value of each metric of rank 0.
    """

    def __init__(self, metrics: MetricSink | None = None, on_progress: OnProgress | None = None) -> None:
        super().__init__(first_line_s=0.0)
        self.last: dict[str, float] = {}
        self._metrics = metrics
        self._on_last = on_progress
        self._steps: Counter[int] = Counter()

    def note(self, rank: int, note: dict[str, Any]) -> None:
        """Pass on a worker's metrics; record and display the metrics of rank 0."""
        values: dict[str, float] = note["metrics"]
        step = self._steps[rank] if note["step"] is None else int(note["step"])
        self._steps[rank] = step + 1
        if self._metrics:
            self._metrics.log(rank, values, step)
        if rank == 0:
            self.last.update(values)
            self.show(Progress(step, None, "steps", values))
            if self._on_last:
                self._on_last(Progress(step, None, "steps", dict(self.last)))

    def continued(self) -> None:
        """Note that the function is called again, and may continue from its last checkpoint."""
        if self._metrics:
            self._metrics.continued()
