from __future__ import annotations

import shlex

import pytest

from shoal.errors import JobError
from shoal.jobs.reconcile.look import HeadBusyError, HeadGoneError, JobClient
from shoal.pool.backends.ray_http import RayJob
from tests.support.fake_ray_head import TOKEN, FakeHead

ARGV = ["sh", "-c", 'exec python -m x "$@"', "it's", "job"]


@pytest.fixture
def client(head):
    return JobClient(head.endpoint.api, TOKEN, wait=0.0)


def test_submitting(client, head):
    assert client.submit(ARGV, "job-1", {"attempt": "1"})

    assert shlex.split(head.jobs["job-1"].entrypoint) == ARGV
    assert head.jobs["job-1"].metadata == {"attempt": "1"}
    assert client.status("job-1") == RayJob("PENDING")


def test_submitting_again_changes_nothing(client, head):
    client.submit(ARGV, "job-1", {})

    assert not client.submit(["other"], "job-1", {})
    assert shlex.split(head.jobs["job-1"].entrypoint) == ARGV


def test_a_head_that_is_not_ready_yet_is_tried_again(client, head):
    head.failures = [(500, "No available agent to submit job, please try again later.")] * 3

    assert client.submit(ARGV, "job-1", {})
    assert head.submissions == 1


def test_a_refusal_as_duplicate_counts_only_if_the_job_is_there(client, head):
    head.failures = [(500, "ValueError: Job with submission_id job-1 already exists.")]

    assert client.submit(ARGV, "job-1", {})
    assert "job-1" in head.jobs


def test_a_head_that_stays_busy_is_given_up(client, head):
    head.failures = [(500, "Traceback\nRuntimeError: no\n")] * 99

    with pytest.raises(HeadBusyError, match=r"refused \(500\): RuntimeError: no"):
        client.submit(ARGV, "job-1", {})


def test_a_bad_request_is_not_tried_again(client, head):
    head.failures = [(400, "Traceback\nTypeError: bad"), (500, "never asked")]

    with pytest.raises(JobError, match="TypeError: bad"):
        client.submit(ARGV, "job-1", {})
    assert len(head.failures) == 1


def test_a_wrong_token_is_said_to_be_refused(head):
    with pytest.raises(JobError, match="refused the token"):
        JobClient(head.endpoint.api, "wrong").submit(ARGV, "job-1", {})
    assert not head.jobs


def test_a_head_that_is_gone(tmp_path):
    head = FakeHead(tmp_path / "other-token")
    api = head.endpoint.api
    head.close()

    with pytest.raises(HeadGoneError, match="does not answer"):
        JobClient(api, TOKEN).status("job-1")


def test_a_server_that_is_no_head(client, head):
    head.failures = [(200, "<html>")]

    with pytest.raises(JobError, match="does not answer like a Ray head"):
        client.status("job-1")


def test_a_job_from_its_log_to_its_end(client, head):
    client.submit(ARGV, "job-1", {})
    head.jobs["job-1"].status = "RUNNING"
    head.jobs["job-1"].logs = "round 1\n"

    assert client.logs("job-1") == "round 1\n"
    with pytest.raises(JobError, match="non-terminal"):
        client.delete("job-1")
    assert client.stop("job-1")
    status = client.status("job-1")
    assert status == RayJob("STOPPED")
    assert status.ended
    assert not client.stop("job-1")
    assert client.delete("job-1")


def test_a_job_that_is_not_there(client):
    assert client.status("nobody") is None
    assert client.logs("nobody") == ""
    assert not client.stop("nobody")
    assert not client.delete("nobody")
