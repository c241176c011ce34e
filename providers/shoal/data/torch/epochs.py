"""Epoch counter that a dataset shares with its copies in the worker processes of a DataLoader.

DataLoader calls ``iter()`` on the copies in its workers, never on the user's dataset. For every epoch it either forks
new copies or keeps the old ones. The counter is therefore in memory that all copies share.

Each worker has a slot that only this worker writes, so no lock is needed that a killed worker could leave locked. A
slot is one 64-bit word, which is read and written atomically. It contains two numbers: how many epochs were begun, and
the round in which the last of these epochs was begun. A round is one set of worker processes; DataLoader draws a random
number for every set, which distinguishes the rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

# The first slot belongs to the main process. All slots take 8 KiB. 1,023 workers are more than a machine has cores.
_SLOTS = 1 + 1_023
_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1


class EpochCounter:
    """Counter of epochs from 0, shared with the copies in the worker processes of a DataLoader."""

    def __init__(self) -> None:
        self._slots = torch.zeros(_SLOTS, dtype=torch.int64).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a spawned DataLoader worker the memory is already shared. Any other copy starts a separate count.
        if not self._slots.is_shared():
            self._slots.share_memory_()

    def next(self) -> int:
        """Return the epoch that the next iterator of this process begins."""
        slot, round_ = _slot_and_round()
        slots = self._slots.numpy().copy()
        begun, rounds = slots & _COUNT, slots >> _COUNT_BITS
        mine = begun[slot] if rounds[slot] == round_ else 0
        # If another worker of this round has already begun an epoch, this worker joins the same epoch.
        joined = begun[(rounds == round_) & (begun > mine)]
        return int(joined.max()) - 1 if len(joined) else int(begun.max())

    def begin(self, epoch: int) -> None:
        """Record that this process has begun an epoch."""
        slot, round_ = _slot_and_round()
        self._slots.numpy()[slot] = round_ << _COUNT_BITS | (epoch + 1)

    def set(self, epoch: int) -> None:
        """Set the epoch that this process begins next.

        The other workers begin the same epoch, unless another worker of this round has already begun one.
        """
        slot, round_ = _slot_and_round()
        slots = self._slots.numpy()
        slots[(slots >> _COUNT_BITS) != round_] = 0
        slots[slot] = round_ << _COUNT_BITS | epoch

    def begun_by_workers(self) -> bool:
        """Return whether workers of a DataLoader, and not the main process, began the last epoch."""
        begun = self._slots.numpy() & _COUNT
        return bool(begun[1:].max() > begun[0])


def _slot_and_round() -> tuple[int, int]:
    """Return the slot and the round (below 2**31) of this process; both are 0 in the main process."""
    worker = get_worker_info()
    if worker is None:
        return 0, 0
    # DataLoader seeds each worker of a round with the same base number plus the worker's index.
    return 1 + worker.id, (worker.seed - worker.id) % (2**31 - 2) + 1
