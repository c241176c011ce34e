"""Metrics that a real receiver of OTLP gets, and that nothing happens while they are off."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pandas as pd
import pytest

from shoal import ComputePool, telemetry
from shoal.data import DataConnector
from shoal.jobs import JobSpec, submission
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.os_processes import ProcessId
from shoal.pool import reconciling
from shoal.state.schema import JobState, Node
from tests.support.job_results import result_of
from tests.support.job_store import POOL, add_node, another_head, head, own_mlflow, spec, store
from tests.support.otlp_receiver import Receiver, receiver
from tests.support.tiny_pools import forked_supervisors, tiny
from tests.support.waiting import wait_until

__all__ = ["another_head", "forked_supervisors", "head", "own_mlflow", "spec", "store", "tiny"]

JOB = {"shoal.pool": POOL, "shoal.job.framework": "xgboost"}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Metrics of this process are on."""
    with receiver() as received:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=cAnArY")
        telemetry._started.cache_clear()
        yield received
        found = telemetry._started("otlp")
        assert found is not None
        received.answers.set()
        found.provider.shutdown()
        telemetry._started.cache_clear()


def test_jobs_are_counted_with_the_seconds_of_their_steps(store, head, spec, received):
    handle = submission.submit(spec, holder="airflow:dag/run", endpoint_of=lambda _: head.endpoint)
    key = Key(handle.job_id, 1)
    assert attempts.start(store, key, ProcessId.mine().to_json(), 1.0)
    times = {"queue": 4.0, "start": 1.0, "read": None, "train": 2.0, "score": None, "upload": 0.5}
    result = result_of(job_id=handle.job_id, times={**times, "read": 0.1}).document()
    telemetry.job_queued(POOL, "xgboost", 4.0)
    attempts.end(store, key, JobState.SUCCEEDED, 2.0, result=result)
    assert not attempts.end(store, key, JobState.FAILED, 3.0)

    [submitted] = received.of("shoal.jobs.submitted")
    assert (submitted.unit, submitted.attributes, submitted.value) == ("{job}", JOB, 1)
    [ended] = received.of("shoal.jobs.ended")
    assert (ended.unit, ended.attributes, ended.value) == ("{job}", {**JOB, "shoal.job.state": "succeeded"}, 1)
    steps = received.of("shoal.job.step.duration")
    assert [each.attributes for each in steps] == [
        {**JOB, "shoal.job.step": step} for step in ("start", "read", "train", "upload")
    ]
    assert {each.unit for each in steps} == {"s"}
    [queued] = received.of("shoal.job.queue.duration")
    assert (queued.unit, queued.attributes, queued.value) == ("s", JOB, 1)
    sent = b"".join(received.bodies)
    assert b"cAnArY" not in sent and handle.job_id.encode() not in sent and b"airflow:dag" not in sent


def test_waits_for_nodes_are_measured_and_embedded_pools_have_one_name(tiny, received):
    pool = ComputePool("local://embedded-12-1?max_nodes=1").up()
    pool.scale(1)

    [waits] = received.of("shoal.pool.wait.duration")
    assert waits.unit == "s"
    assert waits.attributes == {"shoal.pool": "embedded", "shoal.operation.state": "succeeded"}
    assert waits.value == 2


def test_nodes_are_counted_by_pool_and_state_until_they_are_gone(store, received):
    add_node(store, cpus=1)
    telemetry.follow_nodes(lambda: reconciling._node_counts(store))
    telemetry.job_queued(POOL, "xgboost", 1.0)
    found = telemetry._started("otlp")
    assert found is not None

    found.flush()
    with store.transaction() as session:
        session.query(Node).delete()
    found.flush()

    nodes = [each for each in received.points if each.name == "shoal.nodes"]
    assert {each.unit for each in nodes} == {"{node}"}
    assert [(each.attributes, each.value) for each in nodes] == [
        ({"shoal.pool": POOL, "shoal.node.state": "ready"}, 1),
        ({"shoal.pool": POOL, "shoal.node.state": "ready"}, 0),
    ]


def test_a_receiver_that_does_not_answer_keeps_no_caller(received, monkeypatch):
    monkeypatch.setattr("shoal.telemetry._FLUSH_S", 0.01)
    received.answers.clear()

    for _ in range(2):
        telemetry.job_submitted(POOL, "xgboost")

    assert not received.answers.is_set()  # both calls have returned without an answer


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "use otlp"),
        ({"OTEL_METRICS_EXPORTER": "nonsense"}, "use otlp"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/protobuf or grpc"),
    ],
)
def test_an_exporter_that_cannot_be_used_is_told_once(monkeypatch, caplog, variables, said):
    telemetry._started.cache_clear()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    for _ in range(2):
        telemetry.job_submitted(POOL, "xgboost")
    telemetry._started.cache_clear()

    [warning] = caplog.messages
    assert said in warning


@pytest.mark.parametrize("exporter", [None, "", "none"])
def test_nothing_is_imported_while_metrics_are_off(monkeypatch, exporter):
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    if exporter is not None:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
    code = (
        "import sys; from shoal import telemetry; telemetry.job_submitted('a', 'b');"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.strip() == "[]"


def test_processes_of_a_pool_inherit_the_settings_without_credentials(monkeypatch):
    given = {
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=cAnArY",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "api-key=cAnArY",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://me:cAnArY@collector:4318/v1/metrics",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert telemetry.settings() == {name: given[name] for name in list(given)[:2]}


@pytest.mark.ray
@pytest.mark.long
def test_the_processes_of_a_real_job_report_it(fresh_home, received, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    frame = pd.DataFrame({"a": [float(i) for i in range(50)], "y": [i % 2 for i in range(50)]})
    pool = ComputePool("local://observed?max_nodes=1").up()
    try:
        given = JobSpec(
            dataset=DataConnector.from_dataframe(frame).to_spec(), input_cols=("a",), label_col="y", n_estimators=2,
            tracking=None, run_config={"pool_name": "observed"},
        )  # fmt: skip
        submission.submit(given).wait(on_log=None)
        wait_until(lambda: received.of("shoal.job.step.duration"), "the driver's metrics", 30)
        wait_until(lambda: received.of("shoal.nodes"), "the reconciler's metrics", 30)
    finally:
        pool.down()

    job = {"shoal.pool": "observed", "shoal.job.framework": "xgboost"}
    assert [(each.attributes, each.value) for each in received.of("shoal.jobs.submitted")] == [(job, 1)]
    assert [each.attributes for each in received.of("shoal.jobs.ended")] == [{**job, "shoal.job.state": "succeeded"}]
    assert Counter(each.attributes["shoal.job.step"] for each in received.of("shoal.job.step.duration")) == Counter(
        ["start", "read", "train", "upload"]
    )
    assert [each.attributes for each in received.of("shoal.job.queue.duration")] == [job]
    by_process = {each.name: each.instance for each in received.points}
    assert len({by_process[name] for name in ("shoal.jobs.submitted", "shoal.jobs.ended", "shoal.nodes")}) == 3
