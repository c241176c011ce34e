"""Count the epochs of a torch dataset. All copies of the dataset in a DataLoader's worker processes share one count.

A DataLoader with workers calls ``iter()`` on the copies of the dataset in its workers, never on the user's dataset. For
every epoch the DataLoader either starts new workers with new copies, or keeps the old ones. The counter is therefore in
memory that all copies share.

Each worker has a slot: one 64-bit number in the shared memory, which is read and written atomically. Only this worker
writes its slot, so no lock is needed. A killed worker could leave a lock locked. A slot contains two numbers: how many
epochs the worker has begun, and the round in which the last of these epochs began. A round is one set of worker
processes. DataLoader draws a random number for every set, and this number identifies the round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

# Number of slots (64-bit numbers in shared memory): one for the main process and one for each DataLoader worker. 1,023
# workers are more than a machine has cores, and the slots take only 8 KiB.
_SLOTS = 1 + 1_023
_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1


class EpochCounter:
    """Counter of epochs, from 0. All copies of a counter in the worker processes of a DataLoader share one count."""

    def __init__(self) -> None:
        self._slots = torch.zeros(_SLOTS, dtype=torch.int64).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a DataLoader worker that was started by "spawn", the unpickled `_slots` already share memory with the main
        # process. Any other unpickled counter gets shared memory of its own, and therefore counts separately.
        if not self._slots.is_shared():
            self._slots.share_memory_()

    def next(self) -> int:
        """Return the number of the epoch that the next iterator of this process will begin."""
        slot, round_ = _slot_and_round()
        slots = self._slots.numpy().copy()
        begun, rounds = slots & _COUNT, slots >> _COUNT_BITS
        mine = begun[slot] if rounds[slot] == round_ else 0
        # If another worker of the same round (set of workers) has already begun an epoch, this worker begins the same
        # epoch, because all workers of a round read parts of one epoch.
        joined = begun[(rounds == round_) & (begun > mine)]
        return int(joined.max()) - 1 if len(joined) else int(begun.max())

    def begin(self, epoch: int) -> None:
        """Record in shared memory that this process has begun an epoch."""
        slot, round_ = _slot_and_round()
        self._slots.numpy()[slot] = round_ << _COUNT_BITS | (epoch + 1)

    def set(self, epoch: int) -> None:
        """Set the number of the epoch that this process begins next.

        The other workers of the DataLoader begin the same epoch, unless one of them has already begun an epoch.
        """
        slot, round_ = _slot_and_round()
        slots = self._slots.numpy()
        slots[(slots >> _COUNT_BITS) != round_] = 0
        slots[slot] = round_ << _COUNT_BITS | epoch

    def begun_by_workers(self) -> bool:
        """Return whether workers of a DataLoader, and not the main process, began the most recent epoch."""
        begun = self._slots.numpy() & _COUNT
        return bool(begun[1:].max() > begun[0])


def _slot_and_round() -> tuple[int, int]:
    """Return the index of this process's counter in shared memory, and a number that identifies the set of DataLoader
    workers to which this process belongs.

    In the main process, the index and the number are 0. The number is below 2**31.
    """
    worker = get_worker_info()
    if worker is None:
        return 0, 0
    # For each iteration over a DataLoader, PyTorch draws one random number. The seed of a worker is this number plus
    # the worker's index. So the seed minus the index identifies the iteration.
    return 1 + worker.id, (worker.seed - worker.id) % (2**31 - 2) + 1
