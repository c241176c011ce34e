"""A process that is stopped (SIGSTOP, a suspended laptop) and wakes up when its time is over changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from shoal.pool.api import ComputePool
from shoal.pool.reconciling import sweep
from shoal.pool.timeouts import LEASE_TTL
from shoal.state import Store
from tests.support import ROOT, clocks
from tests.support.pool_processes import folders, node_rows, tagged
from tests.support.waiting import wait_until

_PREPARE = """
import os, signal
from shoal.errors import ShoalError
from shoal.pool.api import ComputePool
from shoal.pool.options.local import LocalOptions
from shoal.pool import reconciling
from tests.support.tiny_backend import TinyBackend

reconciling.ensure_running = lambda: None
stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)

class Pausing(TinyBackend):
    def start(self, pool, nodes):
        for node in nodes:
            if pause_before_start: stop()
            super().start(pool, [node])

pause_before_start = False
LocalOptions.backend_class = "__main__:Pausing"
pool = ComputePool("tiny", holder="test:paused")

def ask(what):
    try:
        what()
        print("allowed", flush=True)
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""

_HOLDER = """
lease = pool.lease(3)
stop()
ask(lease.renew)
ask(lambda: pool.wait_for_nodes(3))
"""

_ACTOR = """
pause_before_start = True
ask(lambda: pool.scale(3))
"""


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4").up()


def stopped(script: str) -> psutil.Popen:
    process = psutil.Popen(
        [sys.executable, "-c", _PREPARE + script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the pause")
    return process


def only_the_head_is_there() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        clock = clocks.installed(patch)
        clock.pass_to(LEASE_TTL)  # which is past the deadline of an operation, too
        sweep(Store(), clock=clock)
    return [node.is_head for node in node_rows()] == [True]


def nothing_came_of_it() -> None:
    wait_until(lambda: len(tagged()) == 3, "supervisors with nothing to start to leave")
    assert only_the_head_is_there()
    assert folders() == [node.id for node in node_rows()]
    assert sweep(Store()) == []


def test_a_holder_past_its_lease_is_refused_and_told_why(up):
    process = stopped(_HOLDER)
    wait_until(only_the_head_is_there, "the end of the lease")

    process.send_signal(signal.SIGCONT)

    said, _ = process.communicate(timeout=60)
    renewed, waited = said.splitlines()
    assert renewed.startswith("FencedError: lease") and "has expired or was released" in renewed
    assert waited.startswith('ScaleError: pool "tiny" has 1 of 3 nodes, and the target of the pool is 1')
    nothing_came_of_it()


def test_between_intent_and_act_it_starts_nothing_that_nobody_owns(up):
    process = stopped(_ACTOR)
    wait_until(only_the_head_is_there, "the rollback")

    while process.poll() is None:  # it stops before each of its starts
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: process.poll() is not None or process.status() == psutil.STATUS_STOPPED, "its next step")

    said, _ = process.communicate(timeout=60)
    assert said.startswith('ScaleError: pool "tiny" did not reach 3 nodes'), said
    nothing_came_of_it()
