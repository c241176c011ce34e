"""Deferred waits: they read a real store in a thread of their own, and fire when the job or the nodes are there."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    AirflowTaskTimeout,
    TaskDeferred,
)
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.sdk.module_loading import import_string
from airflow.sdk.serde import deserialize, serialize
from airflow.triggers.base import BaseTrigger

from shoal import history, jobs
from shoal.airflow.operators import DistributedTrainOperator, LeasePoolOperator, ScaleClusterOperator
from shoal.airflow.operators.base import TaskKilledError
from shoal.airflow.sensors import NodesSensor
from shoal.airflow.triggers import JobTrigger, JobWait, PoolTrigger, WaitTrigger
from shoal.errors import InvalidArgumentError, ScaleError
from shoal.jobs import TaskTry, credentials
from shoal.jobs.credentials import DriverKey, Secrets
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import start_if_room
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import reconcile
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import JobState, Lease
from shoal.training.run_config import RunConfig
from tests.airflow.conftest import RUN
from tests.airflow.test_operators import RESULT
from tests.support.job_store import POOL, add_node, change_pool
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until


@pytest.fixture
def at(head, monkeypatch):
    """Where jobs are sent to: a head that is an HTTP server."""
    monkeypatch.setattr("shoal.jobs.submission.pool_endpoint", lambda name, store: head.endpoint)
    monkeypatch.setattr("shoal.jobs.reconcile.look.pool_endpoint", lambda name, store: head.endpoint)
    return head


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """The lines in the task's log."""
    lines: list[str] = []

    def info(text: str, *values: object) -> None:
        lines.append(text % values)

    warning = lambda text, **_: lines.append(text)  # noqa: E731
    monkeypatch.setattr(WaitTrigger, "log", SimpleNamespace(info=info, warning=warning))
    return lines


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch):
    monkeypatch.setattr("shoal.airflow.triggers._ROUND_S", 0.02)


def submit(spec, number: int = 1, key: str = "train/-1") -> jobs.JobHandle:
    return jobs.submit(spec.on_pool(POOL), holder=RUN, key=key, task=TaskTry(key, number))


def key_of(handle: jobs.JobHandle) -> Key:
    return Key(handle.job_id, handle.attempt)


def runs(handle: jobs.JobHandle, *lines: str) -> None:
    attempts.start(Store(), key_of(handle), {}, 1.0)
    write(handle, *lines)


def write(handle: jobs.JobHandle, *lines: str) -> None:
    path = log_path(key_of(handle))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def succeeds(handle: jobs.JobHandle) -> None:
    result = {"job_id": handle.job_id, "attempt": handle.attempt, **RESULT}
    attempts.end(Store(), key_of(handle), JobState.SUCCEEDED, 2.0, result=result)


def state(handle: jobs.JobHandle) -> JobState:
    return attempts.load(Store(), key_of(handle)).state


def trigger_of(handle: jobs.JobHandle, **others: Any) -> JobTrigger:
    given = {"poll_interval": 0.01, "task_try": 1, **others}
    return JobTrigger(job_id=handle.job_id, attempt=handle.attempt, submissions=handle.submissions, **given)


async def first(trigger: WaitTrigger) -> dict[str, Any]:
    async for event in trigger.run():
        return event.payload
    raise AssertionError("no event")


def fire(trigger: WaitTrigger) -> dict[str, Any]:
    return asyncio.run(asyncio.wait_for(first(trigger), 60))


@pytest.mark.parametrize(
    "trigger",
    [
        JobTrigger(job_id="xgboost-1", attempt=2, submissions=3, task_try=4, log_position=5, deadline=6.5),
        PoolTrigger(pool="retrain", holder=RUN, nodes=2, operation_id="x", poll_interval=0.5),
    ],
    ids=lambda trigger: type(trigger).__name__,
)
def test_a_trigger_is_the_same_after_airflow_has_stored_it(trigger):
    path, arguments = trigger.serialize()
    again = import_string(path)(**deserialize(serialize(arguments)))
    assert type(again) is type(trigger) and vars(again) == vars(trigger)


def test_the_log_goes_on_while_deferred_and_after_in_the_worker(store, at, spec, shown, context, monkeypatch):
    operator = DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL, deferrable=True, poll_interval=0.01)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context)
    handle = jobs.attach(jobs.list_jobs()[0].job_id)
    runs(handle, "one", "two")
    with ThreadPoolExecutor(1) as threads:
        event = threads.submit(fire, deferred.value.trigger)
        wait_until(lambda: shown == ["one", "two"], "the first lines")
        write(handle, "three")
        wait_until(lambda: shown == ["one", "two", "three"], "the next line")
        succeeds(handle)
        payload = event.result(60)
    write(handle, "four")
    in_worker: list[str] = []
    monkeypatch.setattr(operator.log, "info", lambda text, *values: in_worker.append(text))
    assert deferred.value.method_name == "execute_complete"
    result = operator.execute_complete(context, payload, **deferred.value.kwargs)
    assert (result["job_id"], result["metrics"]) == (handle.job_id, {"eval-rmse": 1.5})
    assert in_worker == ["four"]
    assert attempts.load(Store(), key_of(handle)).collected_at is not None
    assert at.submissions == 1


def test_a_worker_sends_the_credentials_of_a_queued_job_when_its_driver_asks(
    store, at, spec, shown, context, monkeypatch
):
    """The pool is a Ray cluster of others, and the triggerer has no credentials."""
    monkeypatch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: [])
    monkeypatch.setenv("MY_PIN", "hunter22")
    add_node(store, cpus=1)
    change_pool(store, PoolSpec(name=POOL, backend="ray", address="http://head:1", shared_folders="/"))
    first = submit(spec, key="another task")
    secret = spec.model_copy(update={"run_config": RunConfig(secret_env=("MY_PIN",))})

    def task() -> DistributedTrainOperator:
        return DistributedTrainOperator(
            task_id="train", spec=secret, pool_name=POOL, deferrable=True, poll_interval=0.01, durable=False,
            execution_timeout=timedelta(hours=1),
        )  # fmt: skip

    with pytest.raises(TaskDeferred) as queued:
        task().execute(context)
    [key] = [Key(job.job_id, job.attempt) for job in jobs.list_jobs() if job.job_id != first.job_id]
    assert is_waiting(attempts.load(store, key))
    driver, taken = DriverKey(), []

    def driver_goes_on(*_: object) -> None:
        if sealed := credentials.sealed_for(store, key, driver.public):
            taken.append(Secrets.loads(driver.open(sealed, key.submission_id)).environment["MY_PIN"])
            attempts.start(store, key, {}, 1.0)

    first.cancel()
    start_if_room(jobs.attach(key.job_id).target)
    credentials.ask_for_credentials(store, key, driver.public)
    event = fire(queued.value.trigger)
    monkeypatch.setitem(Target.__init__.__kwdefaults__, "sleep", driver_goes_on)
    with pytest.raises(TaskDeferred) as running:
        task().execute_complete(context, event, **queued.value.kwargs)

    assert taken == ["hunter22"]
    assert running.value.trigger.job_id == key.job_id
    assert running.value.trigger.deadline == queued.value.trigger.deadline
    assert len(jobs.list_jobs()) == 2


def test_a_task_that_is_killed_before_it_is_deferred_takes_its_job_with_it(store, at, spec, context):
    operator = DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL, deferrable=True)
    operator.on_kill()
    with pytest.raises(TaskKilledError):
        operator.execute(context)
    assert [job.state for job in jobs.list_jobs()] == [JobState.CANCELLED]


def test_another_triggerer_goes_on_where_the_killed_one_was(store, at, spec, shown, monkeypatch):
    monkeypatch.setattr("shoal.jobs.reconcile.look.POLL_PERIOD_S", 0.0)
    handle = submit(spec)
    runs(handle, "one", "two")

    async def is_killed() -> None:
        waits = asyncio.create_task(first(trigger_of(handle)))
        while attempts.load(Store(), key_of(handle)).log_shown != len("one\ntwo\n"):
            await asyncio.sleep(0.01)
        waits.cancel()

    asyncio.run(is_killed())
    write(handle, "three")
    with ThreadPoolExecutor(1) as threads:
        event = threads.submit(fire, trigger_of(handle))
        wait_until(lambda: "three" in shown, "the next line")
        succeeds(handle)
        payload = event.result(60)
    assert (payload["timed_out"], payload["log_position"]) == (False, len("one\ntwo\nthree\n"))
    assert shown == ["one", "two", "three"]


def test_all_waits_share_one_thread_and_none_reads_the_store_in_the_event_loop(store, at, spec, shown, monkeypatch):
    handles = [submit(spec, key=f"train/{index}") for index in range(20)]
    for handle in handles:
        runs(handle)
    looks: list[int] = []
    look_at_all, reading = JobWait.look_at_all, Store.reading
    monkeypatch.setattr(
        JobWait, "look_at_all", lambda store, waits: (looks.append(len(waits)), look_at_all(store, waits))
    )
    readers: set[str] = set()
    monkeypatch.setattr(
        Store, "reading", lambda *args, **how: (readers.add(threading.current_thread().name), reading(*args, **how))[1]
    )

    async def all_of_them() -> list[dict[str, Any]]:
        waits = asyncio.gather(*(first(trigger_of(handle)) for handle in handles))
        while 20 not in looks:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(lambda: [succeeds(handle) for handle in handles])
        return await waits

    loop_thread = threading.current_thread().name
    assert len(asyncio.run(asyncio.wait_for(all_of_them(), 60))) == 20
    assert loop_thread not in readers
    assert {name for name in readers if "poller" in name} == {"shoal-poller"}


def test_a_wait_polls_its_job_and_finds_that_its_driver_was_lost(store, at, spec, shown, monkeypatch):
    monkeypatch.setattr("shoal.airflow.triggers._SILENT_S", 0.0)
    monkeypatch.setattr("shoal.jobs.reconcile.look.POLL_PERIOD_S", 0.0)
    handle = submit(spec)
    runs(handle)
    polled = attempts.load(Store(), key_of(handle)).last_polled_at
    with ThreadPoolExecutor(1) as threads:
        event = threads.submit(fire, trigger_of(handle))
        wait_until(lambda: attempts.load(Store(), key_of(handle)).last_polled_at > polled, "the poll")
        at.jobs[f"{handle.job_id}-1"].status = "FAILED"
        assert event.result(60)["timed_out"] is False
    assert state(handle) is JobState.FAILED


def test_one_wait_whose_log_cannot_be_read_does_not_stop_the_others(store, at, spec, shown, caplog):
    """Root reads every file, so that the path of the log is a folder here."""
    bad, good = submit(spec), submit(spec, key="train/1")
    runs(good)
    attempts.start(Store(), key_of(bad), {}, 1.0)
    log_path(key_of(bad)).mkdir(parents=True)

    async def both() -> None:
        over = asyncio.create_task(first(trigger_of(good)))
        broken = asyncio.create_task(first(trigger_of(bad)))
        failed = f"reading the state of job {bad.job_id} failed"
        await asyncio.to_thread(wait_until, lambda: failed in caplog.text, "a look at the log", 30)
        succeeds(good)
        await over
        succeeds(bad)
        await broken

    asyncio.run(both())


def test_a_job_that_waits_for_room_is_started_and_its_log_is_read_from_another_machine(
    store, at, spec, shown, monkeypatch
):
    monkeypatch.setattr("shoal.airflow.triggers._COPY_S", 0.0)
    handle = submit(spec)
    attempts.start(Store(), key_of(handle), {}, 1.0)
    at.jobs[f"{handle.job_id}-1"].logs = "far\n"
    with ThreadPoolExecutor(1) as threads:
        event = threads.submit(fire, trigger_of(handle))
        wait_until(lambda: shown == ["far"], "the line")
        succeeds(handle)
        assert event.result(60)["log_position"] == -len("far\n")


def test_the_deadline_is_that_of_the_trigger_and_cancels_the_job(store, at, spec, shown, context):
    handle = submit(spec)
    runs(handle)
    event = fire(trigger_of(handle, deadline=time.time() - 1))
    operator = DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL)
    job = {"job_id": handle.job_id, "attempt": 1, "submissions": handle.submissions}
    with pytest.raises(AirflowTaskTimeout, match="not done within its execution_timeout"):
        operator.execute_complete(context, event, job)
    assert state(handle) is JobState.CANCELLED
    assert [line.actor for line in history.read(kind="cancelled")] == [RUN]


@pytest.mark.parametrize("timed_out", [False, True])
def test_an_event_of_the_try_before_a_clear_defers_the_task_again(store, at, spec, shown, context, timed_out):
    """SQLite gives the id of the deleted trigger to the next one, so Airflow hands its event to the next try."""
    before = submit(spec, key="before the clear")
    succeeds(before)
    event = fire(trigger_of(before, deadline=time.time() - 1 if timed_out else None))
    operator = DistributedTrainOperator(
        task_id="train", spec=spec, pool_name=POOL, deferrable=True, execution_timeout=timedelta(hours=1)
    )
    with pytest.raises(TaskDeferred) as first_wait:
        operator.execute(context)
    [job] = [job for job in jobs.list_jobs() if job.job_id != before.job_id]

    with pytest.raises(TaskDeferred) as next_wait:
        operator.execute_complete(context, {**event, "timed_out": timed_out}, **first_wait.value.kwargs)

    assert next_wait.value.trigger.serialize() == first_wait.value.trigger.serialize()
    handle = jobs.attach(job.job_id)
    runs(handle, "one")
    succeeds(handle)
    in_worker = operator.execute_complete(context, event, **next_wait.value.kwargs)
    assert in_worker["job_id"] == job.job_id


@pytest.fixture
def task_is(monkeypatch):
    """Set the state of the task in Airflow; None if Airflow does not answer."""

    def set_state(said: str | None) -> None:
        def states(**asked: Any) -> dict[str, dict[str, str]]:
            assert asked == {"dag_id": "a_dag", "task_ids": ["train"], "run_ids": ["a_run"], "map_index": 1}
            if said is None:
                raise ConnectionError("shutting down")
            return {"a_run": {"train_1": said}}

        monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))

    return set_state


def killed(trigger: WaitTrigger) -> None:
    trigger.task_instance = SimpleNamespace(dag_id="a_dag", task_id="train", run_id="a_run", map_index=1, try_number=1)
    asyncio.run(trigger.on_kill())


@pytest.mark.parametrize(
    ("said", "newer_try", "cancel_on_kill", "expected"),
    [
        ("failed", False, True, JobState.CANCELLED),
        ("running", False, True, JobState.CANCELLED),  # cleared: the next try has begun, and has no job yet
        ("running", True, True, JobState.RUNNING),
        ("deferred", False, True, JobState.RUNNING),  # another triggerer has the trigger
        (None, False, True, JobState.RUNNING),
        ("failed", False, False, JobState.RUNNING),
    ],
)
def test_a_kill_ends_the_job_only_if_a_user_has_ended_the_task(
    store, at, spec, shown, task_is, said, newer_try, cancel_on_kill, expected
):
    handle = submit(spec)
    runs(handle)
    if newer_try:
        submit(spec, 2)
    task_is(said)
    killed(trigger_of(handle, cancel_on_kill=cancel_on_kill))
    assert state(handle) is expected
    actors = [line.actor for line in history.read(kind="cancelled")]
    assert actors == ([RUN] if expected is JobState.CANCELLED else [])


def test_airflow_before_3_3_cancels_the_trigger_instead_of_calling_on_kill(
    store, at, spec, shown, task_is, monkeypatch
):
    monkeypatch.delattr(BaseTrigger, "on_kill", raising=False)
    handle = submit(spec)
    runs(handle, "one")
    task_is("failed")

    async def is_cancelled() -> None:
        trigger = trigger_of(handle)
        trigger.task_instance = SimpleNamespace(
            dag_id="a_dag", task_id="train", run_id="a_run", map_index=1, try_number=1
        )
        waits = asyncio.create_task(first(trigger))
        while not shown:
            await asyncio.sleep(0.01)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(is_cancelled())
    assert state(handle) is JobState.CANCELLED


def test_a_task_that_does_not_wait_returns_the_id_of_a_detached_job(store, at, spec, context):
    operator = DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL, wait_for_completion=False)
    submitted = operator.execute(context)
    handle = jobs.attach(submitted["job_id"])
    assert submitted == {"job_id": handle.job_id, "attempt": 1, "pool": POOL}
    assert attempts.load(Store(), key_of(handle)).orphan_after is None


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4", holder=RUN).up()


def reconciled(trigger: WaitTrigger) -> dict[str, Any]:
    """Fire a trigger, while this process does what the pool's reconciler does."""
    with ThreadPoolExecutor(1) as threads:
        event = threads.submit(fire, trigger)
        wait_until(lambda: (reconcile(Store(), "tiny"), event.done())[1], "the event")
        return event.result()


@pytest.mark.parametrize("options", [None, {"block_until_min_cluster_size": 2}])
def test_a_lease_waits_for_its_nodes_in_the_triggerer(up, context, shown, options):
    lease = LeasePoolOperator(
        task_id="lease", size=3, pool_name="tiny", deferrable=True, poll_interval=0.01, options=options
    )
    with pytest.raises(TaskDeferred) as deferred:
        lease.execute(context)
    assert reconciled(deferred.value.trigger) == {"timed_out": False}
    assert lease.execute_complete(context, {"timed_out": False}, **deferred.value.kwargs) == "tiny"
    assert len(up.get_nodes()) >= (2 if options else 3)
    assert any("nodes active" in line for line in shown)


def test_a_lease_that_has_ended_before_its_task_goes_on_is_requested_again(up, context):
    """A paused DAG leaves a deferred task where it is."""
    lease = LeasePoolOperator(task_id="lease", size=1, pool_name="tiny", deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        lease.execute(context)
    reconcile(Store(), "tiny")
    up.release()
    with pytest.raises(TaskDeferred) as again:
        lease.execute_complete(context, {"timed_out": False}, **deferred.value.kwargs)
    assert again.value.kwargs != deferred.value.kwargs
    assert len(up.describe().leases) == 1


def test_a_request_that_is_rolled_back_fails_the_task_with_its_reason(up, context, shown, tiny):
    (tiny / FAIL_FILE).write_text("quota")
    scale = ScaleClusterOperator(
        task_id="scale", expected_cluster_size=3, pool_name="tiny", deferrable=True, poll_interval=0.01
    )
    with pytest.raises(TaskDeferred) as deferred:
        scale.execute(context)
    event = reconciled(deferred.value.trigger)
    with pytest.raises(ScaleError, match="quota"):
        scale.execute_complete(context, event, **deferred.value.kwargs)
    assert up.describe().target == 1


@pytest.mark.parametrize("made", ["lease", "scale"])
def test_the_execution_timeout_of_a_deferred_task_rolls_its_request_back(up, context, made):
    given = {"pool_name": "tiny", "deferrable": True, "execution_timeout": timedelta(minutes=5)}
    if made == "lease":
        operator = LeasePoolOperator(task_id=made, size=3, **given)
    else:
        operator = ScaleClusterOperator(task_id=made, expected_cluster_size=3, **given)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context)
    assert time.time() + 200 < deferred.value.trigger.deadline < time.time() + 400  # not 720 s, as without it
    with pytest.raises(AirflowTaskTimeout, match=f"task {made} was not done within its execution_timeout of 0:05:00"):
        operator.execute_complete(context, {"timed_out": True}, **deferred.value.kwargs)
    assert (up.describe().leases, up.describe().target) == ((), 1)


def test_a_deferred_sensor_with_soft_fail_is_skipped_when_its_nodes_never_come(up, context):
    up.down()
    for soft_fail, error in ((True, AirflowSkipException), (False, AirflowFailException)):
        sensor = NodesSensor(task_id="wait", expected_nodes=2, pool_name="tiny", deferrable=True, soft_fail=soft_fail)
        with pytest.raises(error):
            sensor.execute(context)


def test_a_kill_withdraws_the_request_unless_a_newer_try_has_made_another(up, context, shown, task_is):
    def deferred() -> PoolTrigger:
        with pytest.raises(TaskDeferred) as raised:
            LeasePoolOperator(task_id="lease", size=3, pool_name="tiny", deferrable=True).execute(context)
        return raised.value.trigger

    older, newer = deferred(), deferred()
    task_is("running")
    killed(older)
    assert [lease.size for lease in up.describe().leases] == [3]
    killed(newer)
    assert up.describe().leases == ()

    too_late = LeasePoolOperator(task_id="lease", size=3, pool_name="tiny", deferrable=True)
    too_late.on_kill()
    with pytest.raises(TaskKilledError):
        too_late.execute(context)
    assert up.describe().leases == ()


def test_a_sensor_waits_in_the_triggerer_until_its_own_timeout(up, context, shown):
    up.lease(2, is_async=True)
    sensor = NodesSensor(
        task_id="wait", expected_nodes=2, pool_name="tiny", deferrable=True, poll_interval=0.01, timeout=1000
    )
    with pytest.raises(TaskDeferred) as deferred:
        sensor.execute(context)
    kept = deferred.value.kwargs
    assert deferred.value.trigger.deadline == kept["deadline"] > time.time() + 900
    with pytest.raises(AirflowSensorTimeout, match="timeout of 1000 s"):
        sensor.execute_complete(context, {"timed_out": True}, **kept)
    event = reconciled(deferred.value.trigger)
    sensor.execute_complete(context, event, **kept)
    up.release()
    with pytest.raises(AirflowFailException):
        sensor.execute_complete(context, event, **kept)


def test_a_deferred_wait_renews_the_lease_of_its_run(up, shown, monkeypatch):
    monkeypatch.setattr("shoal.airflow.triggers._RENEW_S", 0.0)
    lease = up.lease(2, is_async=True, ttl=100)
    with Store().transaction() as session:
        session.get_one(Lease, lease.id).expires_at = time.time() + 20

    def is_renewed() -> bool:
        with Store().reading() as session:
            return session.get_one(Lease, lease.id).expires_at > time.time() + 60

    with ThreadPoolExecutor(1) as threads:
        event = threads.submit(fire, PoolTrigger(pool="tiny", holder=RUN, nodes=2, poll_interval=0.01))
        wait_until(is_renewed, "the renewal")
        wait_until(lambda: (reconcile(Store(), "tiny"), event.done())[1], "the event")


def test_airflows_setting_decides_and_wrong_arguments_are_refused(monkeypatch):
    assert not NodesSensor(task_id="wait", expected_nodes=2).deferrable
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")
    assert NodesSensor(task_id="wait", expected_nodes=2).deferrable
    assert LeasePoolOperator(task_id="lease", size=2).deferrable
    assert not LeasePoolOperator(task_id="lease", size=2, deferrable=False).deferrable
    for given, says in ({"deferrable": "no"}, "deferrable='no'"), ({"poll_interval": 0}, "poll_interval=0"):
        with pytest.raises(InvalidArgumentError, match=f"task train: {says}"):
            DistributedTrainOperator(task_id="train", spec={}, **given)
