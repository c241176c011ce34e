"""XGBoost's external memory: decide whether a training keeps its matrices on disk, and create the folder for them.

Only workers import this module, because it imports XGBoost.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xgboost

from shoal.training.boosting.messages import Task
from shoal.training.boosting.rows import Part
from shoal.training.host import memory

# Share of the free memory that the quantised rows (rows converted to histogram bins) may use. If the quantised rows
# need more, they are kept on disk. The share is below one half, because XGBoost needs about as much memory again while
# it builds the matrices and trains.
_MATRIX_FRACTION = 0.4
# Bytes of memory per row for the label, two gradients and the prediction, 4 bytes each. The bins of the row are counted
# separately.
_BYTES_PER_ROW = 4 * 4
# Prefix of the folder names. The process id of the worker follows.
_PREFIX = "shoal-pages-"


@contextmanager
def page_folder(task: Task, local_world_size: int) -> Iterator[Path | None]:
    """Agree with all workers whether the matrices are kept on disk; if so, create a folder for the matrix files.

    If one worker needs the disk, all workers use their disks. The folder is removed at the end of the context.
    """
    on_disk = task.external_memory
    if on_disk is None:
        room = memory.available_bytes() * _MATRIX_FRACTION / local_world_size
        parts = {id(part): part for part in (task.train, *task.eval_sets.values())}.values()
        on_disk = sum(_quantised_bytes(part, task) for part in parts) > room
    if not xgboost.collective.allreduce(np.array([int(on_disk)]), xgboost.collective.Op.MAX)[0]:
        yield None
        return
    _remove_folders_of_dead_workers()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def _remove_folders_of_dead_workers() -> None:
    """Remove the matrix folders of killed workers from the node's temporary folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        if not Path("/proc", folder.name.removeprefix(_PREFIX).split("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _quantised_bytes(part: Part, task: Task) -> int:
    """Return the size in bytes that a worker's rows have in memory after they were converted to bins."""
    # XGBoost stores the number of each bin in 1, 2 or 4 bytes, depending on the column with the most bins. Each
    # category of a categorical column is a bin, so a column with many categories increases the size.
    bins = max([int(task.params.get("max_bin", 256)), *map(len, task.columns.categories.values())])
    each = 1 if bins <= 2**8 else 2 if bins <= 2**16 else 4
    return part.shard.rows * (len(task.columns.features) * each + _BYTES_PER_ROW)
