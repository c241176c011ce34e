"""Credentials of jobs on pools that others run: sealed in the attempt's row for the key of its driver."""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import JobHandle, JobSpec, Tracking, credentials, submission
from shoal.jobs.credentials import (
    AttemptTakenError,
    DriverKey,
    SealError,
    Secrets,
    from_environment,
    left,
    receive,
    seal,
)
from shoal.jobs.driver import main as driver
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile.look import Target
from shoal.jobs.timeouts import CREDENTIALS_PATIENCE_S
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.run_config import RunConfig
from tests.support.fake_ray_head import FakeHead
from tests.support.job_store import POOL, add_node, change_pool

PIN = "hunter22"
SECRET_URI = "http://me:wJalrXUtnFEMI@host"


@pytest.fixture
def remote(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is a Ray cluster of others."""
    for name in from_environment(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: [])
    monkeypatch.setenv("MY_PIN", PIN)
    change_pool(store, PoolSpec(name=POOL, backend="ray", address="http://head:1", shared_folders="/"))


@pytest.fixture
def secret(spec: JobSpec) -> JobSpec:
    return spec.model_copy(
        update={"tracking": Tracking(uri=SECRET_URI), "run_config": RunConfig(pool_name=POOL, secret_env=("MY_PIN",))}
    )


@pytest.fixture
def submit(store: Store, head: FakeHead, remote: None) -> Callable[..., JobHandle]:
    def submit(spec: JobSpec, **options: Any) -> JobHandle:
        return submission.submit(spec, holder="airflow:dag/run", endpoint_of=lambda _: head.endpoint, **options)

    return submit


def key_of(handle: JobHandle) -> Key:
    return Key(handle.job_id, handle.attempt)


def row(handle: JobHandle) -> Job:
    return attempts.load(Store(), key_of(handle))


def received(handle: JobHandle, *waiting: JobHandle) -> Secrets | None:
    """What a driver receives if these handles wait for the job."""
    clock = iter(range(0, int(CREDENTIALS_PATIENCE_S) + 61, 60))

    def sleep(_: float) -> None:
        for each in waiting:
            each.status()

    return receive(Store(), key_of(handle), monotonic=lambda: float(next(clock)), sleep=sleep)


class TestSealing:
    def test_only_the_driver_of_the_attempt_opens_a_message(self):
        mine, another = DriverKey(), DriverKey()
        message = seal(b"hunter22", mine.public, "job-1")

        assert mine.open(message, "job-1") == b"hunter22"
        assert message != seal(b"hunter22", mine.public, "job-1")
        with pytest.raises(SealError, match="not encrypted for this attempt"):
            another.open(message, "job-1")
        with pytest.raises(SealError):
            mine.open(message, "job-2")

    @pytest.mark.parametrize("place", [0, 31, 32, 43, 44, -1])
    def test_a_changed_message_is_refused(self, place):
        mine = DriverKey()
        message = bytearray(b64decode(seal(b"hunter22", mine.public, "job-1")))
        message[place] ^= 1

        with pytest.raises(SealError):
            mine.open(b64encode(message).decode(), "job-1")

    @pytest.mark.parametrize("message", ["", "####", b64encode(b"x" * 40).decode(), b64encode(bytes(80)).decode()])
    def test_what_is_no_message_is_refused(self, message):
        with pytest.raises(SealError):
            DriverKey().open(message, "job-1")

    @pytest.mark.parametrize("key", ["", "####", b64encode(b"short").decode(), b64encode(bytes(32)).decode()])
    def test_what_is_no_key_gets_no_credentials(self, key):
        with pytest.raises(SealError, match="no valid driver key"):
            seal(b"hunter22", key, "job-1")


class TestHandOver:
    def test_a_waiting_process_seals_them_and_they_go_when_the_job_runs(self, submit, secret, store):
        handle = submit(secret)
        assert row(handle).needs_credentials
        assert left() == set()

        found = received(handle, handle)

        assert found is not None
        assert found.environment["MY_PIN"] == PIN
        assert found.uris == {"/tracking/uri": SECRET_URI}
        assert found.redact(f"the pin is {PIN}") == "the pin is ***"
        sealed = row(handle)
        for text in (PIN, "wJalrXUtnFEMI"):
            assert text not in str([vars(sealed), b64decode(sealed.sealed_credentials)])
        attempts.start(store, key_of(handle), {}, 1.0)
        assert (row(handle).driver_key, row(handle).sealed_credentials) == (None, None)

    def test_a_job_that_ends_before_it_runs_leaves_none(self, submit, secret, store):
        handle = submit(secret)
        received(handle, handle)
        assert row(handle).sealed_credentials

        handle.cancel()

        assert (row(handle).driver_key, row(handle).sealed_credentials) == (None, None)

    def test_another_process_that_asks_for_the_same_job_sends_them(self, submit, secret):
        first = submit(secret)

        again = submit(secret)
        assert (again.job_id, again.attempt) == (first.job_id, first.attempt)
        found = received(first, again)

        assert found is not None
        assert found.environment["MY_PIN"] == PIN

    def test_a_process_without_them_sends_nothing_and_the_driver_fails_at_its_deadline(self, submit, secret):
        handle = submit(secret)

        with pytest.raises(JobError, match=r"waited 10 minutes for the job.s credentials.* Submit the job"):
            received(handle, submission.attach(handle.job_id))

    def test_credentials_of_another_attempt_are_refused_and_the_attempt_fails(self, submit, secret, store, monkeypatch):
        first, second = submit(secret), submit(secret, key="another")
        received(first, first)
        stolen = row(first).sealed_credentials

        asks = credentials.ask_for_credentials

        def replayed(store: Store, key: Key, driver_key: str) -> bool:
            return asks(store, key, driver_key) and credentials.send_credentials(store, key, driver_key, stolen)

        monkeypatch.setattr(credentials, "ask_for_credentials", replayed)
        monkeypatch.setattr(sys, "argv", ["driver", second.job_id, "1"])

        assert driver.main() == 1

        ended = row(second)
        assert ended.state is JobState.FAILED
        assert "were not encrypted for this attempt and this driver" in ended.error
        assert ended.sealed_credentials is None

    def test_a_second_driver_of_the_attempt_does_not_get_the_first_ones(self, submit, secret):
        handle = submit(secret)
        received(handle, handle)
        old = row(handle).driver_key

        assert received(handle, handle) is not None
        assert row(handle).driver_key != old
        assert credentials.sealed_for(Store(), key_of(handle), old) is None

    def test_a_driver_exits_if_another_driver_of_the_attempt_has_asked(self, submit, secret, store):
        handle = submit(secret)

        with pytest.raises(AttemptTakenError):
            receive(
                store,
                key_of(handle),
                sleep=lambda _: credentials.ask_for_credentials(store, key_of(handle), "other"),
            )

        assert row(handle).driver_key == "other"
        assert row(handle).state is JobState.PENDING

    def test_a_job_whose_submission_is_refused_now_gets_its_credentials_from_a_new_process(
        self, submit, secret, monkeypatch
    ):
        first = submit(secret)

        def refuse(*_: object) -> None:
            raise InvalidArgumentError("no job can run on the nodes")

        monkeypatch.setattr("shoal.jobs.remote_files.check_nodes", refuse)
        again = submit(secret)

        assert received(first, again) is not None

    def test_a_driver_of_a_cancelled_job_waits_for_nothing(self, submit, secret):
        handle = submit(secret)
        handle.cancel()

        assert received(handle) is None

    def test_a_job_without_credentials_and_a_job_of_a_local_pool_wait_for_none(self, submit, spec, secret, store):
        without = submit(spec.model_copy(update={"tracking": None}))
        assert (row(without).needs_credentials, received(without)) == (False, None)
        change_pool(store, PoolSpec(name=POOL))

        local = submit(secret, key="local")

        assert (row(local).needs_credentials, received(local)) == (False, None)
        assert left() == {key_of(local).submission_id}

    def test_a_detached_job_is_submitted_when_its_driver_has_them(self, submit, secret, store, monkeypatch):
        own, taken = DriverKey(), []

        def driver_goes_on(*_: object) -> None:
            [job] = submission.list_jobs()
            key = Key(job.job_id, job.attempt)
            if sealed := credentials.sealed_for(store, key, own.public):
                taken.append(Secrets.loads(own.open(sealed, key.submission_id)))
                attempts.start(store, key, {}, 1.0)
            elif sealed is None:
                credentials.ask_for_credentials(store, key, own.public)

        monkeypatch.setitem(Target.__init__.__kwdefaults__, "sleep", driver_goes_on)

        handle = submit(secret, detached=True)

        assert row(handle).state is JobState.RUNNING
        assert taken[0].environment["MY_PIN"] == PIN

    def test_a_queued_job_does_not_keep_a_task_that_is_to_be_deferred(self, submit, secret, store):
        add_node(store, cpus=1)
        submit(secret)
        waiting = submit(secret, key="second")
        assert is_waiting(row(waiting))

        assert waiting.deliver_credentials(while_queued=False) is False
