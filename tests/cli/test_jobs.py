"""`shoal jobs …` and `shoal train` without a pool that is up."""

import json
import math
import re
from contextlib import contextmanager

import pytest
from sqlalchemy import update

from shoal.cli.jobs import _parse
from shoal.errors import JobFailedError
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal.metric_points import MetricPoint, encoded
from shoal.state import Store
from shoal.state.schema import Job, JobMetrics, JobState
from tests.cli.conftest import document

SPEC = {
    "dataset": {"paths": ["flights/2013-01.parquet"]},
    "input_cols": ["distance"],
    "label_col": "arr_delay",
    "params": {"objective": "reg:squarederror"},
    "run_config": {"seed": 7},
}


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({**SPEC, "params": {}}))
    return str(path)


def test_no_jobs(shoal):
    assert shoal("jobs", "list").stdout == "no jobs\n"
    assert document(shoal("jobs", "list", "--json").stdout) == {"jobs": []}


def test_jobs_are_listed(shoal, some_jobs):
    text = shoal("jobs", "list").stdout
    for word in (*some_jobs, "succeeded", "round 8 of 10", "rank 1 met a null label"):
        assert word in text
    listed = document(shoal("jobs", "list", "--pool", "gone", "--json").stdout)["jobs"]
    assert {job["job_id"]: job["progress"] and job["progress"]["done"] for job in listed} == {
        "good": 8,
        "bad": None,
        "waiting": None,
    }
    assert len(document(shoal("jobs", "list", "--limit", "1", "--json").stdout)["jobs"]) == 1


def test_a_job_is_listed_and_shown_with_its_model_and_task(shoal, some_jobs):
    run = {"holder": "airflow:prod:retrain/a_run", "task_key": "group.train/3", "label": "flights (2013-01)"}
    with Store().transaction() as session:
        session.execute(update(Job).where(Job.id == "good").values(**run))
    assert "flights (2013-01) by retrain.group.train[3]" in shoal("jobs", "list").stdout
    text = shoal("jobs", "show", "good").stdout
    assert re.search(r"for +flights \(2013-01\) *\ntask +retrain.group.train\[3\] *\n", text)
    assert document(shoal("jobs", "show", "good", "--json").stdout)["label"] == "flights (2013-01)"


def test_jobs_that_wait_are_shown_with_their_place(shoal, some_jobs, a_pool):
    with Store().transaction() as session:
        session.execute(update(Job).where(Job.state == JobState.PENDING).values(pool=a_pool, priority=5, queued_at=2.0))

    assert "pending, position 1" in shoal("jobs", "list").stdout
    listed = document(shoal("jobs", "list", "--json").stdout)["jobs"]
    assert {job["job_id"]: (job["position"], job["priority"]) for job in listed} == {
        "good": (None, 0), "bad": (None, 0), "waiting": (1, 5),
    }  # fmt: skip
    assert "0 running, 1 waiting for room" in shoal("pool", "describe").stdout
    waiting = {"job_id": "waiting", "attempt": 1, "holder": "cli:me@here", "priority": 5, "position": 1}
    assert document(shoal("pool", "describe", "--json").stdout)["jobs"] == {"running": 0, "waiting": [waiting]}


def test_a_job_is_shown_with_its_result(shoal, some_jobs):
    text = shoal("jobs", "show", "good").stdout
    assert "models:/flights/1" in text
    assert "metrics eval-rmse" in text
    assert "round 8 of 10, eval-rmse: 1.25, eval-nan: nan" in text
    shown = document(shoal("jobs", "show", "good", "--json").stdout)
    assert shown["state"] == "succeeded"
    assert shown["result"]["metrics"] == {"eval-rmse": 1.25, "eval-nan": None}
    metrics = {"eval-rmse": 1.25, "eval-nan": None}
    assert shown["progress"] == {"done": 8, "total": 10, "unit": "rounds", "metrics": metrics}


def test_a_job_whose_pool_is_gone_has_failed(shoal, some_jobs):
    assert document(shoal("jobs", "show", "waiting", "--json").stdout)["state"] == "failed"


def test_the_log_of_a_job(shoal, some_jobs):
    path = log_path(_key("bad"))
    path.parent.mkdir(parents=True)
    path.write_text("round 1\nround [2]\n")
    assert shoal("jobs", "logs", "bad").stdout == "round 1\nround [2]\n"
    followed = shoal("jobs", "logs", "bad", "--follow", "--json")
    assert document(followed.stdout) == {"job_id": "bad", "attempt": 1, "lines": ["round 1", "round [2]"]}
    assert followed.stderr == "round 1\nround [2]\n"


def test_the_metrics_of_a_job(shoal, some_jobs):
    points = [MetricPoint(step, float(step), {"eval-rmse": 2.0 - step, "eval-nan": math.nan}) for step in (0, 1)]
    with Store().transaction() as session:
        session.add(JobMetrics(job_id="bad", attempt=1, seq=0, generation=0, points=encoded(points)))
    text = "0\teval-rmse: 2\teval-nan: nan\n1\teval-rmse: 1\teval-nan: nan\n"
    assert shoal("jobs", "metrics", "bad").stdout == text
    followed = shoal("jobs", "metrics", "bad", "--follow", "--json")
    assert followed.stderr == text
    shown = document(followed.stdout)
    assert shown["metrics"][1] == {"step": 1, "at": 1.0, "values": {"eval-rmse": 1.0, "eval-nan": None}}
    assert document(shoal("jobs", "metrics", "waiting", "--json").stdout)["metrics"] == []


def test_cancelling_what_has_ended_changes_nothing(shoal, some_jobs):
    result = shoal("jobs", "cancel", "good")
    assert result.exit_code == 0
    assert "had already ended: succeeded" in result.stdout


def test_cancelling_a_job(shoal, some_jobs):
    cancelled = document(shoal("jobs", "cancel", "waiting", "--json").stdout)
    assert cancelled == {"job_id": "waiting", "attempt": 1, "cancelled": True, "state": "cancelled", "left": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "dataset"),
        (json.dumps({**SPEC, "label": "x"}), "label"),
        (json.dumps({**SPEC, "run_config": 1}), "run_config"),
    ],
)
def test_a_wrong_spec_is_refused(shoal, text, said):
    result = shoal("train", "-", "--json", input=text)
    assert result.exit_code == 2
    assert said in document(result.stdout)["error"]["message"]


def test_a_training_without_a_pool_has_an_embedded_one_for_its_time(shoal, spec_file, monkeypatch):
    events = []

    @contextmanager
    def embedded(why, **size):
        events.append(("up", why))
        yield "embedded-1"
        events.append("down")

    def submit(spec, holder):
        events.append(spec.run_config.pool_name)
        return FakeHandle()

    monkeypatch.setattr("shoal.distributors.call_pool.embedded_pool", embedded)
    monkeypatch.setattr("shoal.jobs.submit", submit)
    monkeypatch.setattr(FakeHandle, "wait", lambda handle, **_: None)
    shoal("train", spec_file)
    why = "the store contains no pool: create one with `shoal pool up local://NAME`"
    assert events == [("up", why), "embedded-1", "down"]
    assert shoal("train", spec_file, "--pool", "nope").exit_code == 3
    detached = shoal("train", spec_file, "--detach")
    assert detached.exit_code == 2
    assert "with --detach, the job needs a pool that stays up" in detached.stderr
    assert len(events) == 3


def test_options_go_into_the_spec():
    spec = _parse(SPEC, pool_name="retrain", job_id="mine", detach=True)
    config = spec.run_config
    assert (config.pool_name, config.job_id, config.orphan_after, config.seed) == ("retrain", "mine", None, 7)


class FakeHandle:
    """Stands where a job of a real pool would."""

    job_id, attempt, pool = "mine", 1, "retrain"
    ends_with: BaseException | None = None
    cancelled = False

    def wait(self, on_log, on_progress):
        on_log("round 1")
        raise self.ends_with

    def cancel(self, reason):
        self.cancelled = True


@pytest.mark.parametrize(("error", "code"), [(JobFailedError("rank 0: boom"), 1), (KeyboardInterrupt(), 130)])
def test_a_training_that_ends_badly(shoal, a_pool, spec_file, monkeypatch, error, code):
    monkeypatch.setattr(FakeHandle, "ends_with", error)
    handle = FakeHandle()
    monkeypatch.setattr("shoal.jobs.submit", lambda spec, holder: handle)
    result = shoal("train", spec_file, "--pool", a_pool, "--json")
    assert result.exit_code == code
    assert handle.cancelled is isinstance(error, KeyboardInterrupt)
    assert document(result.stdout)["error"]["exit_code"] == code
    assert "round 1" in result.stderr


def test_a_detached_training(shoal, a_pool, spec_file, monkeypatch):
    monkeypatch.setattr("shoal.jobs.submit", lambda spec, holder: FakeHandle())
    assert "shoal jobs logs mine --follow" in shoal("train", spec_file, "--detach").stdout
    detached = document(shoal("train", spec_file, "--detach", "--json").stdout)
    assert detached == {"job_id": "mine", "attempt": 1, "pool": "retrain"}


def _key(job_id):
    from shoal.jobs.journal.attempts import Key

    return Key(job_id, 1)
