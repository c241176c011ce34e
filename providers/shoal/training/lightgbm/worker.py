"""Run one worker of a LightGBM training: sample the rows, convert them to bins, and train together with the other
workers.

Only workers import this module, because it imports LightGBM. The driver calls `begin`, `bin_sample` and `prepare`, then
`boost` for each segment (group of rounds that ends with a checkpoint), then `finish`, each on all ranks at once.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightgbm
from lightgbm.basic import _LIB, LightGBMError, _c_str, _safe_call
from lightgbm.callback import CallbackEnv

from shoal.boosting_libraries import loaded
from shoal.errors import TrainingError, WorkerLostError
from shoal.lazy_imports import pa
from shoal.training import cluster
from shoal.training.boosting.messages import Boosted, History, Part, Prepared, Segment, Task
from shoal.training.boosting.params import Direction
from shoal.training.boosting.rows import CheckLabel, ShardRows, label_check
from shoal.training.boosting.worker_fit import fit_worker, naming_memory, refuse_if_too_large
from shoal.training.gang.worker import PeerError
from shoal.training.host import memory
from shoal.training.host.own_process import is_loopback, repeating, tie_to_loopback
from shoal.training.lightgbm import dataset
from shoal.training.lightgbm.dataset import Binned, Bins, find_bins, sample
from shoal.training.lightgbm.library import Share, shares
from shoal.training.lightgbm.params import objective_of, own_message
from shoal.training.lightgbm.segments import Trainer
from shoal.training.reporting import GangContext, gang_context
from shoal.training.timeouts import COLLECTIVE_S

if TYPE_CHECKING:
    from shoal.training.boosting.trials import OnRound


# First words of LightGBM's messages about network errors. Such an error means that another worker was lost, so shoal
# raises PeerError.
_NETWORK = ("Socket ", "Connecting to rank", "Cannot find any ip and port")

# If a process is stopped and continued while it receives with a time-out, the kernel ends the call (signal(7)), and
# LightGBM fails: the training goes on from its last checkpoint.
_INTERRUPTED = "Interrupted system call"


class _Log:
    """LightGBM's log without its information about connections and files.

    LightGBM keeps `verbosity` for each thread, and the functions that connect the workers do not get it. The line
    "Listening..." remains, because LightGBM writes it in a thread that knows no log of Python.
    """

    def info(self, message: str) -> None:
        """Print a message of any level, as LightGBM calls this method for all messages of its own."""
        if "[Info]" not in message:
            print(message, flush=True)

    warning = info


class Session:
    """State of a LightGBM training in one worker.

    Args:
        task: Data and parameters of the worker.
        share: Position of the worker's rows among all rows.
        context: Gang context of this worker.
    """

    def __init__(self, task: Task, share: Share, context: GangContext) -> None:
        began = time.perf_counter()
        self._idle = memory.reset_peak()
        self.task = task = replace(task, user_code=task.user_code.ending_forks())
        if int(task.params.get("verbosity", -1)) < 1:
            lightgbm.register_logger(_Log())
        self._context = context
        # Arrow has the threads of one worker, also if this one has the CPUs of several.
        pa.set_cpu_count(int(task.params["num_threads"]))
        room = memory.available_bytes() // context.local_world_size
        self._fit = fit_worker(
            "lightgbm", task, room, workers=context.world_size, all_rows=share.total, rank=share.rank
        )
        refuse_if_too_large("lightgbm", task, self._fit)
        self.port = Port(cluster.own_address() if context.world_size > 1 else "127.0.0.1")
        self._rows = self._shard_rows(task.train)
        # The session stores the position of the rows and not the sample, so that the memory of the sample is free when
        # the datasets are built.
        self._share = share
        self._machines: tuple[str, ...] = ()
        self.binned: tuple[Binned, dict[str, Binned]] | None = None
        self._trainer: Trainer | None = None
        self._seconds = time.perf_counter() - began

    def naming_memory(self) -> AbstractContextManager[None]:
        """Return a context in which a lack of memory is an error with the predicted memory."""
        return naming_memory("lightgbm", self.task, self._fit, self._idle)

    def sample(self) -> pa.Table:
        """Read this worker's part of the sample for LightGBM's bins."""
        began = time.perf_counter()
        chosen = sample(self._rows, self._share, self.task.params, self.task.seed)
        self._seconds += time.perf_counter() - began
        return chosen

    def bin_sample(self, rows: pa.Table) -> Bins:
        """Find the bins from the whole sample.

        This rank uses the threads of all workers on its node, because the other workers wait.
        """
        began = time.perf_counter()
        params = self.task.params
        threads = int(params.get("num_threads", 1)) * self._context.local_world_size
        bins = find_bins(rows, self.task.columns.features, params, threads)
        memory.trim()
        self._seconds += time.perf_counter() - began
        return bins

    def prepare(self, bins: Bins, machines: tuple[str, ...]) -> Prepared:
        """Build this worker's LightGBM datasets with the bins that rank 0 has found."""
        began = time.perf_counter()
        task = self.task
        self._machines = machines
        columns = task.columns
        reference = bins.reference(columns.categories)
        keep = loaded("lightgbm").reads_again(task)
        # If the worker's part of the sample is its whole shard, the rows are not decoded again. More memory was in use
        # when the bins were found.
        table = dataset.own()
        if table is not None and len(table) < task.train.shard.rows:
            table = None
            dataset.forget()
        train = Binned(self._rows, reference, keep=keep, table=table)
        del table
        dataset.forget()
        evals = {name: self._shard_rows(part) for name, part in task.eval_sets.items()}
        binned = {name: Binned(rows, reference, keep=keep) for name, rows in evals.items()}
        self.binned = train, binned
        self._trainer = Trainer(task, self._context, train, binned)
        read = sum(rows.seconds for rows in (self._rows, *evals.values()))
        quantising = self._seconds + time.perf_counter() - began - read
        return Prepared(self._rows.passes, read, quantising, self._idle, *self._fit.figures(self._idle))

    def boost(self, segment: Segment) -> Boosted:
        """Connect to the other workers at the first call, and train the rounds up to the next checkpoint."""
        assert self._trainer is not None
        # The workers connect here and not earlier, because LightGBM must find the bins without its network. Here all
        # ranks have already read their rows, so no worker waits long for another worker.
        self.port.join(self._machines)
        return self._trainer.boost(segment)

    def _shard_rows(self, part: Part) -> ShardRows:
        return ShardRows(part, self.task.columns, self._fit.cache_budget, binary_check(self.task), keep_types=True)


_session: Session | None = None


def begin(task: Task, share: Share) -> tuple[Any, str]:
    """Read this worker's rows for the first time, and return the worker's part of the sample for LightGBM's bins, as
    `dataset.share` returns it, and the address and port at which the worker will listen.

    The part is shared by the worker, so that the whole sample is stored only once and the driver holds none of it.

    Raises:
        DataError: The rows cannot be used, or their bins do not fit in memory.
    """
    global _session
    with own_errors():
        _session = Session(task, share, gang_context())
        with _session.naming_memory():
            shared = dataset.share(_session.sample())
        # malloc keeps the blocks of the freed rows, which are small.
        memory.trim()
        return shared, _session.port.address


def bin_sample(samples: Sequence[Any]) -> Bins | None:
    """Find LightGBM's bins from the samples of all workers; ranks other than 0 get no samples and do nothing.

    Raises:
        TrainingError: LightGBM failed; the message contains LightGBM's message.
    """
    assert _session is not None
    if not samples:
        return None
    try:
        sample = pa.concat_tables(map(dataset.fetch, samples))
    except LookupError as exc:
        raise PeerError(f"the sample of another worker is lost: {exc}") from exc
    with own_errors(), _session.naming_memory():
        return _session.bin_sample(sample)


def prepare(bins: Bins, machines: tuple[str, ...]) -> Prepared:
    """Build this worker's LightGBM datasets with the bins that rank 0 has found.

    Args:
        bins: The bins.
        machines: Address and port of each worker, by rank.

    Raises:
        DataError: The rows cannot be used for the training.
        TrainingError: LightGBM failed; the message contains LightGBM's message.
    """
    assert _session is not None
    with own_errors(), _session.naming_memory():
        return _session.prepare(bins, machines)


def boost(segment: Segment) -> Boosted:
    """Train the rounds of a segment (up to the next checkpoint) together with the other workers.

    Raises:
        TrainingError: LightGBM failed; the message contains LightGBM's message.
        PeerError: Another worker failed.
    """
    assert _session is not None
    with own_errors(), _session.naming_memory():
        return _session.boost(segment)


def finish() -> None:
    """Release the datasets and disconnect from the other workers."""
    global _session
    session, _session = _session, None
    assert session is not None
    with own_errors():
        session.port.close()
    del session
    memory.trim()


def binary_check(task: Task) -> CheckLabel | None:
    """Return a function that raises DataError if a label is neither 0 nor 1; None if the objective is not binary.

    LightGBM itself would treat every label that is not positive as 0.
    """
    if objective_of(task.params) != "binary":
        return None
    rule = 'objective="binary" accepts only the labels 0 and 1'
    return label_check(lambda label: (label != 0) & (label != 1), rule)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise the errors of LightGBM as shoal's errors."""
    try:
        yield
    except LightGBMError as exc:
        message = own_message(exc)
        if _INTERRUPTED in message:
            raise WorkerLostError(f"a pause of its process has broken LightGBM's connection ({message})") from exc
        kind = PeerError if message.startswith(_NETWORK) else TrainingError
        raise kind(f"LightGBM: {message}") from exc


# Number of attempts to bind LightGBM to the reserved port. shoal must release the port just before LightGBM binds to
# it, so another process may take the port. That process may soon release the port, so shoal tries again.
_TRIES = 10
_PATIENCE_SECONDS = 0.5
_TIE_SECONDS = 0.002


class Port:
    """Port that is reserved on this node for LightGBM, which accepts only the number of a port and not an open socket.

    Args:
        host: Address of this node.

    Raises:
        TrainingError: The address is an IPv6 address, which LightGBM does not support.
    """

    def __init__(self, host: str) -> None:
        if ":" in host:
            raise TrainingError(
                f"LightGBM does not support IPv6, but the address of this node is {host}: create the pool with IPv4 "
                "addresses"
            )
        self._host = host
        # This socket reserves the port number and does not listen. It is bound to all addresses of the host, because
        # LightGBM will also bind to all addresses.
        self._held = socket.socket()
        self._held.bind(("", 0))
        self._number: int = self._held.getsockname()[1]
        self._joined = False

    @property
    def address(self) -> str:
        """Address and port at which the other workers can connect to this worker, as ``host:port``."""
        return f"{self._host}:{self._number}"

    def join(self, machines: Sequence[str]) -> None:
        """Connect to the other workers, and return when all are connected; further calls do nothing.

        Raises:
            TrainingError: Another process took the port.
        """
        if self._joined or len(machines) == 1:
            return
        self._held.close()
        text = _c_str(",".join(machines))
        with _listening_on_loopback_only() if is_loopback(self._host) else contextlib.nullcontext():
            for last in (*[False] * (_TRIES - 1), True):
                try:
                    _safe_call(_LIB.LGBM_NetworkInit(text, self._number, COLLECTIVE_S // 60, len(machines)))
                    break
                except LightGBMError as exc:
                    if "Binding port" not in str(exc):
                        raise
                    if last:
                        raise TrainingError(
                            f"another process uses port {self._number} of {self._host}, which shoal had reserved for "
                            "LightGBM: start the training again"
                        ) from exc
                time.sleep(_PATIENCE_SECONDS)
        self._joined = True

    def close(self) -> None:
        """Disconnect from the other workers; if this worker never connected, release the reserved port."""
        self._held.close()
        if self._joined:
            _safe_call(_LIB.LGBM_NetworkFree())


def _listening_on_loopback_only() -> AbstractContextManager[None]:
    """Restrict LightGBM's listening socket to the loopback device while the workers connect, so that no other host can
    connect.

    LightGBM opens the socket inside a C call and closes it when all workers are connected. A second thread therefore
    looks for the socket during the call. The thread can run, because ctypes releases the GIL during the call.
    """
    return repeating(tie_to_loopback, _TIE_SECONDS, "shoal-tie")


_OF_TRAININGS = frozenset(
    {
        *("learning_rate", "num_leaves", "max_depth", "min_data_in_leaf", "min_sum_hessian_in_leaf", "num_iterations"),
        *("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction", "bagging_freq", "bagging_seed"),
        *("feature_fraction", "feature_fraction_bynode", "feature_fraction_seed", "extra_trees", "extra_seed"),
        *("lambda_l1", "lambda_l2", "linear_lambda", "min_gain_to_split", "path_smooth", "max_delta_step"),
        *("drop_rate", "max_drop", "skip_drop", "xgboost_dart_mode", "uniform_drop", "drop_seed"),
        *("top_rate", "other_rate", "data_sample_strategy", "boosting", "objective_seed"),
        *("min_data_per_group", "cat_l2", "cat_smooth", "max_cat_threshold", "max_cat_to_onehot"),
        *("metric", "scale_pos_weight", "is_unbalance", "alpha", "fair_c", "poisson_max_delta_step", "sigmoid"),
        *("tweedie_variance_power", "histogram_pool_size", "verbosity"),
    }
)
"""Parameters that LightGBM does not use for a dataset, so that trials with other values share the dataset. A trial with
another value of any other parameter builds the dataset anew."""


class Trials:
    """The datasets of this worker, and the parameters with which they were built.

    Args:
        context: Context of a worker that trains alone.
    """

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._key: str | None = None
        self._session: Session | None = None

    def boost(self, task: Task, on_round: OnRound) -> Callable[[Segment], Boosted]:
        """Begin a training, and return the function that trains a segment of it."""
        callbacks = (*task.user_code.callbacks, _Rounds(on_round))
        task = replace(task, user_code=replace(task.user_code, callbacks=callbacks))
        with own_errors():
            trainer = self._trainer(task)
        return own_errors()(trainer.boost)

    def direction(self, task: Task, metric: str | None) -> Direction | None:
        """Return the direction that the user's function tells of its metric; without a name, of the last metric."""
        with own_errors():
            return self._trainer(task).direction(metric)

    def _trainer(self, task: Task) -> Trainer:
        varied = _OF_TRAININGS - {"min_data_in_leaf"} if task.params.get("feature_pre_filter") else _OF_TRAININGS
        key = repr(sorted((name, repr(each)) for name, each in task.params.items() if name not in varied))
        if key != self._key:
            self._session = self._key = None
            memory.trim()
            [share] = shares([task.train.shard.rows])
            session = Session(task, share, self._context)
            session.port.close()
            chosen = session.sample()
            if cluster.ray_if_connected() is None:
                dataset.share(chosen)
            session.prepare(session.bin_sample(chosen), ())
            self._session, self._key = session, key
        assert self._session is not None
        assert self._session.binned is not None
        ending_forks = replace(task, user_code=task.user_code.ending_forks())
        return Trainer(ending_forks, self._context, *self._session.binned)


class _Rounds:
    """LightGBM callback that passes the metrics of each round on.

    Args:
        on_round: Function that gets the round and the metrics.
    """

    order = 5

    def __init__(self, on_round: OnRound) -> None:
        self._on_round = on_round

    def __call__(self, env: CallbackEnv) -> None:
        history: History = {}
        for name, metric, value, *_ in env.evaluation_result_list or []:
            history.setdefault(name, {})[metric] = [float(value)]
        self._on_round(env.iteration, history)
