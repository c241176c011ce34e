"""One rank of a LightGBM training: it samples its shard, bins it, and boosts together with the others.

Loaded in workers only: it imports LightGBM. A training is `begin`, `prepare`, `boost` once per segment, `finish`, each
called on all ranks at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
from lightgbm.basic import LightGBMError

from shoal.data.planning.row_groups import RowRange
from shoal.errors import DataError, TrainingError
from shoal.training.boosting.rows import CheckLabel, Part, ShardRows, cache_budget
from shoal.training.boosting.task import Boosted, Prepared, Segment, Task
from shoal.training.context import TrainingContext, get_context
from shoal.training.gang.worker import PeerError
from shoal.training.host import memory
from shoal.training.lightgbm.binning import make_reference
from shoal.training.lightgbm.dataset import Binned
from shoal.training.lightgbm.messages import Agreed, Offer, Opening
from shoal.training.lightgbm.network import Port
from shoal.training.lightgbm.params import objective_of, own_message
from shoal.training.lightgbm.sampling import sample
from shoal.training.lightgbm.segments import Trainer, begins_anew_with

# LightGBM gives a bin one byte, or two where there are more of them.
_ONE_BYTE_BINS = 256
# Beside the bins, measured at 1 M and 5 M rows: label, the row's place in the tree, and for each score of
# a row the score itself, its gradients, and those once more in the order of the leaves.
_BYTES_PER_ROW = 26
_BYTES_PER_SCORE = 24
# How its network's errors begin.
_NETWORK = ("Socket ", "Connecting to rank", "Cannot find any ip and port")


class _Session:
    """A training that is under way in this process.

    Args:
        opening: What to do.
        context: This worker's place.
    """

    def __init__(self, opening: Opening, context: TrainingContext) -> None:
        began = time.perf_counter()
        self._idle = memory.reset_peak()
        self.task = task = opening.task
        self._context = context
        refuse_if_too_large(task, context.local_world_size, memory.available_bytes())
        self.port = Port(_own_address() if context.world_size > 1 else "127.0.0.1")
        self._rows = self._shard_rows(task.train)
        self.offer = Offer(sample(self._rows, opening.share, task.params, task.seed), self.port.address)
        self._machines: tuple[str, ...] = ()
        self._trainer: Trainer | None = None
        self._seconds = time.perf_counter() - began

    def prepare(self, agreed: Agreed) -> Prepared:
        """Bin the rows, in the bins that all have agreed on."""
        import ray

        began = time.perf_counter()
        task = self.task
        self._machines = agreed.machines
        columns = task.columns
        reference = make_reference(ray.get(agreed.sample), columns.features, task.params, columns.categories)
        keep = begins_anew_with(task)
        train = Binned(self._rows, reference, keep=keep)
        evals = {name: self._shard_rows(part) for name, part in task.eval_sets.items()}
        binned = {name: Binned(rows, reference, keep=keep) for name, rows in evals.items()}
        self._trainer = Trainer(task, self._context, train, binned)
        read = sum(rows.seconds for rows in (self._rows, *evals.values()))
        quantising = self._seconds + time.perf_counter() - began - read
        return Prepared(self._rows.passes, read, quantising, self._idle)

    def boost(self, segment: Segment) -> Boosted:
        """Train the rounds of a segment."""
        assert self._trainer is not None
        # Not before: the bins have to be found without a network, and now all ranks have read their rows.
        self.port.join(self._machines)
        return self._trainer.boost(segment)

    def _shard_rows(self, part: Part) -> ShardRows:
        budget = cache_budget(part, self._context.local_world_size, often=begins_anew_with(self.task))
        return ShardRows(part, self.task.columns, budget, label_check(self.task))


_session: _Session | None = None


def begin(opening: Opening) -> Offer:
    """Read this worker's rows for the first time.

    Args:
        opening: What to do.

    Returns:
        Its part of the sample, and where it will listen.

    Raises:
        DataError: If the rows cannot be used, or their bins will not fit in memory.
    """
    global _session
    with _own_errors():
        _session = _Session(opening, get_context())
        return _session.offer


def prepare(agreed: Agreed) -> Prepared:
    """Build this worker's datasets.

    Args:
        agreed: What all go by.

    Returns:
        What it took.

    Raises:
        DataError: If the rows cannot be used.
        TrainingError: If LightGBM refuses, with its message.
    """
    assert _session is not None
    with _own_errors():
        return _session.prepare(agreed)


def boost(segment: Segment) -> Boosted:
    """Train a segment of the rounds.

    Args:
        segment: Which.

    Raises:
        TrainingError: If LightGBM refuses, with its message.
        PeerError: If another worker failed.
    """
    assert _session is not None
    with _own_errors():
        return _session.boost(segment)


def finish() -> None:
    """Let go of the datasets and of the other workers."""
    global _session
    session, _session = _session, None
    assert session is not None
    with _own_errors():
        session.port.close()
    del session
    memory.trim()


def refuse_if_too_large(task: Task, workers: int, available: int) -> None:
    """Refuses rows that will not fit in memory: LightGBM has no external memory.

    Args:
        task: What is to be trained on.
        workers: Workers on this node.
        available: Bytes that they have together.

    Raises:
        DataError: With the figures, and what to do.
    """
    features = len(task.columns.features)
    width = features * (1 if int(task.params.get("max_bin", 255)) < _ONE_BYTE_BINS else 2)
    width += _BYTES_PER_ROW + _BYTES_PER_SCORE * int(task.params.get("num_class", 1))
    rows = task.train.shard.rows + sum(part.shard.rows for part in task.eval_sets.values())
    if rows * width * workers > available:
        raise DataError(
            f"{rows:,} rows of {features} features for each of {workers} worker(s) on this node take "
            f"{rows * width * workers / 2**30:.1f} GiB in LightGBM's bins and scores, and {available / 2**30:.1f} GiB "
            "are left: use more nodes or larger ones, or XGBEstimator, which can train from disk"
        )


def label_check(task: Task) -> CheckLabel | None:
    """What refuses labels but 0 and 1 for a binary objective; LightGBM would take all that are not positive for 0."""
    if objective_of(task.params) != "binary":
        return None

    def check(label: np.ndarray, rows: RowRange) -> None:
        bad = np.flatnonzero((label != 0) & (label != 1))
        if len(bad):
            raise DataError(
                f'{rows.path}, row group {rows.row_group}: the label "{task.columns.label}" is {label[bad[0]]} at row '
                f"{rows.start + int(bad[0])}, but the objective binary takes labels 0 and 1 only"
            )

    return check


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except LightGBMError as exc:
        message = memory.explained(own_message(exc))
        kind = PeerError if message.startswith(_NETWORK) else TrainingError
        raise kind(f"LightGBM: {message}") from exc


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
