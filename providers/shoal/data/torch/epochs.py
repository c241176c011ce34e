"""The number of the epoch, counted together by a dataset's copies in the worker processes of a DataLoader.

DataLoader calls ``iter()`` on the copies in its workers, never on the dataset that the user holds, and it either forks
new copies of that for every epoch or keeps the old ones. So the count lies in memory that all copies share, with a slot
for each worker, which only that worker writes: no lock can be left behind by a worker that is killed. A slot holds two
numbers in one word, which is read and written whole: the epochs begun, and the round that began the last of them.
DataLoader draws a number for every set of workers, which tells their round from any before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

# The first slot is the main process's. 8 KiB in all; a thousand workers on one machine are more than its cores.
_SLOTS = 1 + 1_023
_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1


class EpochCounter:
    """Counts epochs from 0; copies in other processes of a DataLoader count with it."""

    def __init__(self) -> None:
        self._slots = torch.zeros(_SLOTS, dtype=torch.int64).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # DataLoader hands a spawned worker the memory itself; any other copy starts a count of its own.
        if not self._slots.is_shared():
            self._slots.share_memory_()

    def next(self) -> int:
        """The epoch that an iterator of this process begins next."""
        slot, round_ = _place()
        slots = self._slots.numpy().copy()
        begun, rounds = slots & _COUNT, slots >> _COUNT_BITS
        mine = begun[slot] if rounds[slot] == round_ else 0
        # Begun already by another worker of this round: this one joins it.
        joined = begun[(rounds == round_) & (begun > mine)]
        return int(joined.max()) - 1 if len(joined) else int(begun.max())

    def begin(self, epoch: int) -> None:
        """Says that this process has begun an epoch."""
        slot, round_ = _place()
        self._slots.numpy()[slot] = round_ << _COUNT_BITS | (epoch + 1)

    def set(self, epoch: int) -> None:
        """Has `epoch` come next: in this process, and in all of them where no other worker of its round has begun."""
        slot, round_ = _place()
        slots = self._slots.numpy()
        slots[(slots >> _COUNT_BITS) != round_] = 0
        slots[slot] = round_ << _COUNT_BITS | epoch

    def begun_by_workers(self) -> bool:
        """Whether the last epoch was begun by a DataLoader's workers and not by the main process."""
        begun = self._slots.numpy() & _COUNT
        return bool(begun[1:].max() > begun[0])


def _place() -> tuple[int, int]:
    """The slot of this process, and its round, below 2**31: 0 in the main process."""
    worker = get_worker_info()
    if worker is None:
        return 0, 0
    # All workers of a round are seeded with the same number, each plus its own.
    return 1 + worker.id, (worker.seed - worker.id) % (2**31 - 2) + 1
