"""`pool_lease`: the pool is as it was, whatever happens in the block."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from prefect import flow, task, unmapped
from prefect.exceptions import MissingContextError
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from shoal.errors import InvalidArgumentError, MissingExtraError, PoolDownError, ScaleError
from shoal.pool.api import ComputePool as CorePool
from shoal.pool.api import list_pools
from shoal.pool.reconciling import sweep
from shoal.pool.timeouts import LEASE_TTL
from shoal.prefect import ComputePool, distributed_train, pool_lease, wait_for_nodes
from shoal.prefect.current_run import Block, Submissions
from shoal.prefect.lease import PoolLeaseContext
from shoal.prefect.reports import NodeLog
from shoal.state import Store
from tests.support import clocks, waiting_jobs
from tests.support.pool_processes import nothing_left
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server
POOL = "local://tiny?max_nodes=4"


@pytest.fixture
def home(server, tiny):
    return tiny


@flow
def leased(size, pool=POOL, body=None):
    with pool_lease(size, pool_name=pool) as mine:
        return body(mine) if body else len(mine.get_nodes())


def state() -> tuple[str, int, tuple]:
    status = CorePool("tiny").describe()
    return status.state, len(status.active), status.leases


async def cancelled_at(event, hold):
    """Run `hold`, cancel it when the event is set, and return the state of the pool after its end."""
    holding = asyncio.ensure_future(hold())
    await asyncio.to_thread(event.wait)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    return state()


def fail(pool):
    raise RuntimeError("boom")


@pytest.mark.parametrize("pool", [POOL, ComputePool(name="tiny")], ids=["uri", "block"])
def test_a_pool_that_was_down_is_down_again(home, pool):
    assert leased(3, pool) == 3
    assert state() == ("down", 0, ())
    nothing_left()


def test_a_changed_block_defines_the_pool_anew_and_a_uri_of_a_flow_does_not(home):
    CorePool("local://tiny?max_nodes=2", holder="airflow:production:dag/run").up().down()
    with pytest.raises(InvalidArgumentError, match="write the same URI"):
        leased(3)
    assert leased(3, ComputePool(name="tiny", max_nodes=5)) == 3
    assert leased(4) == 4  # the runs of all flows are one definer


def test_a_pool_that_was_up_is_as_it_was(home):
    CorePool(POOL).up().scale(2)
    assert leased(3, "tiny") == 3
    assert state() == ("up", 2, ())


@pytest.mark.parametrize("pool", [POOL, "tiny"])
def test_failure_restores_it_alike(home, pool):
    if pool == "tiny":
        CorePool(POOL).up()
    ended = leased(3, pool, fail, return_state=True)
    assert ended.is_failed() and "boom" in ended.message
    assert state() == (("up", 1, ()) if pool == "tiny" else ("down", 0, ()))


def test_nodes_that_do_not_come_leave_it_as_it_was(home):
    CorePool(POOL).up()
    (home / FAIL_FILE).write_text("quota exceeded")
    with pytest.raises(ScaleError, match="quota exceeded"):
        leased(3)
    assert state() == ("up", 1, ())


def test_a_pool_that_does_not_come_up_is_down(home):
    (home / FAIL_FILE).write_text("quota exceeded")
    with pytest.raises(ScaleError, match="quota exceeded"):
        leased(3)
    assert state() == ("down", 0, ())


def test_a_size_above_max_nodes_is_refused_and_leaves_nothing(home):
    with pytest.raises(InvalidArgumentError, match="MAX_NODES=4"):
        leased(9)
    assert list_pools() == []


def test_a_local_pool_is_refused_without_ray_and_leaves_nothing(server, fresh_home, monkeypatch):
    monkeypatch.setattr("shoal.pool.backends.local.backend.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="or use a pool whose nodes need no Ray in this environment"):
        leased(2, "local://no-ray?max_nodes=4")
    assert list_pools() == []


def test_a_name_alone_starts_nothing(home):
    CorePool(POOL).up().down()
    with pytest.raises(PoolDownError):
        leased(2, "tiny")
    assert state() == ("down", 0, ())


def test_what_others_lease_is_left_alone(home):
    def another_comes(pool):
        CorePool("tiny", holder="test:other").lease(2)

    leased(3, body=another_comes)
    wait_until(lambda: sweep(Store()) == [] and state()[:2] == ("up", 2), "the other's two nodes")


def test_exclusive_leases_add_up(home):
    other = CorePool(POOL, holder="test:other")
    other.lease(2, exclusive=True, bring_up=True)

    @flow
    def exclusively():
        with pool_lease(2, exclusive=True, pool_name="tiny") as pool:
            return len(pool.get_nodes())

    assert exclusively() == 4
    wait_until(lambda: sweep(Store()) == [] and state()[:2] == ("up", 2), "the other's two nodes")


def test_a_base_demand_that_was_set_meanwhile_is_left_alone(home):
    leased(3, body=lambda pool: CorePool("tiny").scale(2))
    wait_until(lambda: sweep(Store()) == [] and state() == ("up", 2, ()), "the two nodes that were asked for")


def test_async_it_is_the_same(home):
    @flow
    async def aleased():
        async with pool_lease(2, pool_name=POOL) as pool:
            return len(pool.get_nodes())

    assert asyncio.run(aleased()) == 2
    assert state() == ("down", 0, ())


def test_cancelled_while_it_grows_nothing_is_left(home, monkeypatch):
    """An async flow that is cancelled takes back what it began, before it ends."""
    grows = threading.Event()
    monkeypatch.setattr("shoal.pool.waiting.WAIT_PERIOD", 0.05)
    monkeypatch.setattr(
        "shoal.prefect.lease.NodeLog.__call__",
        lambda log, status, call=NodeLog.__call__: (grows.set(), call(log, status)),
    )

    async def hold():
        async with pool_lease(4, pool_name=POOL):
            await asyncio.Event().wait()

    @flow
    async def cancelled():
        return await cancelled_at(grows, hold)

    assert asyncio.run(cancelled()) == ("down", 0, ())


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_error_after_the_lease_was_granted_releases_it(home, monkeypatch, how):
    monkeypatch.setattr(Block, "begin", fail)

    @flow
    async def aleased():
        async with pool_lease(1, pool_name=POOL):
            pass

    with pytest.raises(RuntimeError, match="boom"):
        leased(1) if how == "sync" else asyncio.run(aleased())
    assert state() == ("down", 0, ())


def test_cancelled_when_the_lease_was_granted_already_nothing_is_left(home, monkeypatch):
    granted, cancelled = threading.Event(), threading.Event()
    enter = PoolLeaseContext._enter

    def enters(lease, *arguments):
        pool = enter(lease, *arguments)
        granted.set()
        assert cancelled.wait(60)
        return pool

    monkeypatch.setattr(PoolLeaseContext, "_enter", enters)
    monkeypatch.setattr(NodeLog, "interrupt", lambda _: cancelled.set())

    async def hold():
        async with pool_lease(1, pool_name=POOL):
            pytest.fail("the block began")

    @flow
    async def cancels():
        return await cancelled_at(granted, hold)

    assert asyncio.run(cancels()) == ("down", 0, ())


@pytest.fixture
def leaving(monkeypatch):
    """An event that is set when a block of `pool_lease` has ended and waits for what it submitted."""
    event = threading.Event()
    wait = Submissions.wait
    monkeypatch.setattr(Submissions, "wait", lambda submissions: (event.set(), wait(submissions)))
    return event


@task
def after(event, number=0):
    """The number, and how many leases there are once the event is set; 13 fails."""
    event.wait()
    if number == 13:
        raise RuntimeError("unlucky")
    return number, len(CorePool("tiny").describe().leases)


@task
def submits(event):
    after.submit(event)


def test_submitted_task_runs_keep_the_lease_until_they_end(home, leaving, logged):
    @flow
    def submitting():
        with pool_lease(2, pool_name=POOL):
            after.submit(leaving)
            submits(leaving)
            submits.submit(leaving)
            numbers = after.map(unmapped(leaving), [1, 13, 2])
        assert state() == ("down", 0, ())
        for future in numbers:
            future.wait(timeout=0)  # otherwise `state` is that on the server, which records it a little later
        assert all(future.state.is_final() for future in numbers)
        return [future.result(raise_on_failure=False) for future in numbers]

    first, failed, last = submitting(return_state=True).result(raise_on_failure=False)
    assert (first, last) == ((1, 1), (2, 1))
    assert str(failed) == "unlucky"
    logged("pool_lease waits for")


def test_what_is_submitted_after_the_block_is_not_waited_for(home):
    released = threading.Event()

    @flow
    def submitting():
        with pool_lease(2, pool_name=POOL):
            pass
        late = after.submit(released)
        with pool_lease(2, pool_name=POOL):
            pass
        released.set()
        return late.result()

    assert submitting() == (0, 0)


def test_an_error_in_the_block_does_not_wait(home):
    released = threading.Event()

    @flow
    def failing():
        with suppress(RuntimeError), pool_lease(2, pool_name=POOL):
            running = after.submit(released)
            raise RuntimeError("boom")
        assert state() == ("down", 0, ())
        released.set()
        return running.result()

    assert failing() == (0, 0)


def test_two_async_leases_wait_for_their_own_task_runs(home, leaving):
    """Side by side in one flow run; the first ends while the second goes on."""
    first_is_over = threading.Event()

    async def leased_for(pool, event):
        async with pool_lease(2, pool_name=pool):
            future = after.submit(event)
        first_is_over.set()
        return await asyncio.to_thread(future.result)

    @flow
    async def both():
        return await asyncio.gather(leased_for(POOL, leaving), leased_for("local://other?max_nodes=4", first_is_over))

    assert asyncio.run(both()) == [(0, 1), (0, 0)]


def test_cancelled_while_it_waits_for_task_runs_it_releases_the_pool(home, leaving):
    released = threading.Event()

    async def hold():
        async with pool_lease(2, pool_name=POOL):
            after.submit(released)

    @flow
    async def cancelled():
        now = await cancelled_at(leaving, hold)
        released.set()
        return now

    assert asyncio.run(cancelled()) == ("down", 0, ())


def train(name: str) -> None:
    """Start a training in a task run of its own, and return when its job waits."""
    distributed_train.submit(waiting_jobs.spec_of(name), pool_name="tiny")
    wait_until(lambda: name in waiting_jobs.unfinished(), f"job {name}")


def leases() -> list[tuple[str, int]]:
    return [(lease.holder.partition("/")[2], lease.size) for lease in CorePool("tiny").describe().leases]


def test_the_end_of_a_nested_block_leaves_the_job_and_the_lease_of_the_outer_block(jobs):
    @flow
    def nested():
        with suppress(RuntimeError), pool_lease(2, pool_name=POOL):
            train("outer")
            with suppress(RuntimeError), pool_lease(1, pool_name="tiny"):
                train("inner")
                assert leases() == [("1", 2), ("2", 1)]
                raise RuntimeError("boom")
            waiting_jobs.wait_for("outer")
            assert leases() == [("1", 2)]
            raise RuntimeError("boom")

    nested()
    waiting_jobs.wait_for()
    assert state() == ("down", 0, ())


def test_the_end_of_a_block_ends_the_blocks_of_subflows_inside_it(jobs):
    @flow
    def holds():
        with pool_lease(1, pool_name="tiny"):
            distributed_train(waiting_jobs.spec_of("inner"), pool_name="tiny")

    @task
    def calls():
        holds()

    @flow
    def nested():
        with suppress(RuntimeError), pool_lease(2, pool_name=POOL):
            calls.submit()
            waiting_jobs.wait_for("inner")
            raise RuntimeError("boom")

    nested()
    waiting_jobs.wait_for()
    assert state() == ("down", 0, ())


def test_tasks_that_have_a_block_each_do_not_end_each_others_jobs(jobs):
    first_is_over = threading.Event()

    @task
    def own_block(name):
        with suppress(RuntimeError), pool_lease(1, pool_name="tiny"):
            train(name)
            waiting_jobs.wait_for("first", "second") if name == "first" else first_is_over.wait(60)
            raise RuntimeError("boom")
        if name == "first":
            left = waiting_jobs.unfinished()
            first_is_over.set()
            return left

    @flow
    def mapped():
        CorePool(POOL).up()
        return own_block.map(["first", "second"]).result()

    assert mapped() == [{"second"}, None]
    waiting_jobs.wait_for()
    assert leases() == []


def test_coroutines_that_have_a_block_each_do_not_end_each_others_jobs(jobs):
    started, first_is_over = asyncio.Event(), asyncio.Event()

    async def own_block(name, until, then):
        with suppress(RuntimeError):
            async with pool_lease(1, pool_name=POOL):
                await asyncio.to_thread(train, name)
                then.set() if name == "second" else None
                await until.wait()
                raise RuntimeError("boom")
        then.set()
        return waiting_jobs.unfinished()

    @flow
    async def both():
        first, second = own_block("first", started, first_is_over), own_block("second", first_is_over, started)
        return await asyncio.gather(first, second)

    assert asyncio.run(both()) == [{"second"}, set()]


def test_a_task_waits_for_the_nodes_of_the_block_around_it(home):
    CorePool(POOL, holder="test:other").lease(1, exclusive=True, bring_up=True)

    @flow
    def exclusively():
        refused = pytest.raises(ScaleError, match=r"1 of 2 nodes for the lease of prefect:.*/1, and the target")
        with pool_lease(1, exclusive=True, pool_name="tiny"), refused:
            wait_for_nodes(2, pool_name="tiny")

    exclusively()
    CorePool("tiny", holder="test:other").release()


def test_a_flow_that_a_task_calls_has_its_own_block(home):
    @flow
    def child():
        with pool_lease(1, pool_name="tiny"):
            return CorePool("tiny").describe().leases[0].holder, str(flow_run.id)

    @task
    def calls():
        return child()

    @flow
    def parent():
        CorePool(POOL).up()
        return calls()

    holder, run_id = parent()
    assert holder.startswith(f"prefect:{run_id}/")


def test_outside_of_a_run_it_says_what_to_use(home):
    with pytest.raises(MissingContextError, match=r"shoal\.ComputePool\.lease"), pool_lease(2, pool_name=POOL):
        pass


_KILLED = """
import os, signal
from prefect import flow, task, unmapped
from shoal.pool.options.local import LocalOptions
from shoal.pool import reconciling
from shoal.prefect import pool_lease

LocalOptions.backend_class = "tests.support.tiny_backend:TinyBackend"
reconciling.ensure_running = lambda: None

@flow
def killed():
    with pool_lease(3, pool_name="tiny"):
        os.kill(os.getpid(), signal.SIGKILL)

killed()
"""


def test_killed_its_lease_expires_and_a_sweep_takes_the_nodes(home, monkeypatch):
    CorePool(POOL).up()
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}
    ran = subprocess.run([sys.executable, "-c", _KILLED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    late = clocks.installed(monkeypatch)
    late.pass_to(LEASE_TTL)
    wait_until(lambda: (sweep(Store(), clock=late), state() == ("up", 1, ()))[1], "the pool to be back at one node")
