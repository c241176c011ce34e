"""Running a training from outside of any pool: as a job on the pool that is meant, else on an embedded one."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.errors import InvalidArgumentError, NoPoolError
from shoal.pool.api import ComputePool
from shoal.pool.processes import ProcessId
from shoal.pool.spec import PoolSpec
from shoal.pool.which import which_pool
from shoal.state import Store
from shoal.training.request import TrainRequest, TrainResult

_embedded = itertools.count(1)


def run_as_job(request: TrainRequest, callbacks: Sequence[Any] = ()) -> TrainResult:
    """Submit a training, stream its log to this process's standard output, and load what it returned.

    Args:
        request: What to train.
        callbacks: The library's callbacks, which cannot travel with a spec yet.

    Raises:
        InvalidArgumentError: There are callbacks.
        DataError: Footers show that the rows cannot be used; nothing was started.
        JobFailedError: The training failed; the message ends with the cause.
    """
    from shoal.jobs import submit
    from shoal.jobs.model_files import load_training
    from shoal.jobs.spec import JobSpec
    from shoal.training.inputs import checked_data

    if callbacks:
        raise InvalidArgumentError(
            "callbacks work where the process is connected to the pool's Ray, not in a job: leave them out, or call "
            "ray.init(<the pool's address>) first"
        )
    checked_data(request)  # here too, so that a misspelt column does not cost the start of a pool
    with _pool_for(request.run_config.pool_name) as pool_name:
        spec = JobSpec.of_request(request, pool_name=pool_name, tracked=bool(os.environ.get("MLFLOW_TRACKING_URI")))
        handle = submit(spec)
        return load_training(handle.wait(on_log=_print))


def _print(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _pool_for(name: str | None) -> Iterator[str]:
    """The pool that the one rule names; where there is none, one embedded in this process for the duration."""
    try:
        known = which_pool(Store(), name)
    except NoPoolError:
        known = None
    if known:
        yield known
        return
    spec = PoolSpec(
        name=f"embedded-{os.getpid()}-{next(_embedded)}",
        max_nodes=1,
        cpus_per_node=len(os.sched_getaffinity(0)),
    )
    print(f"no pool here: training on an embedded one, {spec.uri}", file=sys.stderr, flush=True)
    pool = ComputePool(spec)
    pool.up(owner=ProcessId.mine())
    try:
        yield pool.name
    finally:
        pool.down()
