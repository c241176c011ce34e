"""Jobs of a pool that is bound to another host on the same store: what can be done from here, and what is left."""

from __future__ import annotations

import json

import pytest

from shoal.jobs import submission
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.os_processes import ProcessId, host_id, hostname
from shoal.state.schema import Job, JobState, Lease, Pool
from tests.support import another_host
from tests.support.job_store import POOL

HOLDER = "airflow:dag/run"


@pytest.fixture
def running(store, head, spec, monkeypatch) -> Key:
    """A job that runs on this host's pool, and has credentials that its driver has not read."""
    another_host.required()
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-caller")
    with store.transaction() as session:
        session.get_one(Pool, POOL).host_id = host_id()
    handle = submission.submit(spec, holder=HOLDER, endpoint_of=lambda _: head.endpoint)
    key = Key(handle.job_id, handle.attempt)
    assert attempts.start(store, key, ProcessId.mine().to_json(), 1.0)
    return key


def row(store, key: Key) -> Job:
    return attempts.load(store, key)


@pytest.mark.processes
def test_cancel_from_another_host_cancels_and_says_what_is_left(store, running):
    done = another_host.shoal("jobs", "cancel", running.job_id, "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == {
        "job_id": running.job_id,
        "attempt": 1,
        "cancelled": True,
        "state": "cancelled",
        "left": f"the driver of job {running.job_id} ends by itself on host {hostname()} within seconds",
    }
    assert row(store, running).state is JobState.CANCELLED


@pytest.mark.processes
def test_clean_up_from_another_host_cancels_releases_and_says_what_is_left(store, running):
    with store.transaction() as session:
        session.add(Lease(id="l", pool=POOL, holder=HOLDER, size=2, epoch=1, ttl=900.0, expires_at=9e9, created_at=0.0))

    report = another_host.python(
        f"import json; from shoal.jobs import clean_up; print(json.dumps(clean_up({POOL!r}, {HOLDER!r}).to_dict()))"
    )

    assert report == {
        "cancelled": [running.job_id],
        "released": True,
        "swept": [f"job {running.job_id}, attempt 1: removed credentials that no driver had read"],
        "left": [
            f"the driver of job {running.job_id} ends by itself on host {hostname()} within seconds",
            f'host {hostname()} ends the nodes of pool "{POOL}" that nothing else needs',
        ],
    }
    assert row(store, running).state is JobState.CANCELLED
    with store.reading() as session:
        assert session.query(Lease).all() == []


def test_a_job_that_another_host_cancelled_before_it_began_leaves_no_credentials(store, running, monkeypatch):
    from shoal.jobs import credentials
    from shoal.jobs.credentials import Secrets
    from shoal.jobs.driver import main as driver

    credentials.hand_over(running.submission_id, Secrets({"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}))
    attempts.end(store, running, JobState.CANCELLED, 2.0, error="on request")
    monkeypatch.setattr("sys.argv", ["driver", running.job_id, "1"])

    assert driver.main() == 0

    assert credentials.take(running.submission_id) == Secrets()
