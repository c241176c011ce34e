"""Flows that hold nodes of a pool of tiny nodes until somebody ends them.

``python -m tests.prefect.holding`` runs `hold` in this process, ``python -m tests.prefect.holding serve`` serves all.
"""

from __future__ import annotations

import signal
import sys

from prefect import flow, serve
from prefect.runtime import flow_run

from shoal.jobs import cleanup
from shoal.pool import reconciling
from shoal.pool.api import ComputePool
from shoal.pool.options.local import LocalOptions
from shoal.prefect import clean_up_run, distributed_train, job_task, pool_lease
from shoal.state import home
from tests.support import waiting_jobs

# In the process of a run too, which loads this file; a test must not import it.
LocalOptions.backend_class = "tests.support.tiny_backend:TinyBackend"
reconciling.ensure_running = lambda: None
job_task.submit = waiting_jobs.submit
cleanup.settle_jobs = lambda _: []  # it would start the jobs


@flow
def hold() -> None:
    """Hold three nodes; their end is up to `pool_lease`."""
    with pool_lease(3, pool_name="tiny"):
        wait()


@flow(on_cancellation=[clean_up_run])
def leave() -> None:
    """Claim three nodes; their end is up to the hook."""
    ComputePool("tiny", holder=f"prefect:{flow_run.id}").lease(3)
    wait()


@flow
def child() -> None:
    """Wait for a job in another thread, which a signal does not interrupt."""
    training = distributed_train.submit(waiting_jobs.spec_of("of-the-subflow"), pool_name="tiny")
    waiting_jobs.wait_for("of-the-subflow")
    (home() / "held-by").write_text(str(flow_run.parent_flow_run_id))
    training.result()


@flow(on_cancellation=[clean_up_run])
def lead() -> None:
    """Hold three nodes for a subflow."""
    with pool_lease(3, pool_name="tiny"):
        child()


def wait() -> None:
    """Say in `$SHOAL_HOME` which run has its nodes, and wait for a signal."""
    (home() / "held-by").write_text(str(flow_run.id))
    signal.pause()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve(*(one.to_deployment(name="served") for one in (hold, leave, lead)), pause_on_shutdown=False)
    else:
        hold()
