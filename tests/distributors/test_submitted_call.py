"""Calls that do not wait: submitted by one process, found by another, with what they need for as long as the job."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from sqlalchemy import select

from shoal import ComputePool, RunConfig
from shoal.data import DataConnector
from shoal.distributors import attach, distributed, ray_launch, submit_predict
from shoal.distributors.call import SubmittedCall
from shoal.distributors.call_pool import gpus_of, pool_of_job
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, Response, TorchDistributor
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import (
    CapacityTimeoutError,
    InvalidArgumentError,
    JobBusyError,
    JobCancelledError,
    JobNotFoundError,
    StoreUnreachableError,
)
from shoal.jobs import FunctionJobSpec, JobSpec, PredictJobSpec, submission
from shoal.jobs.files import artifacts
from shoal.jobs.handle import JobTimeoutError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.kind import parse_spec
from shoal.jobs.reconcile import acts
from shoal.jobs.reconcile.acts import Supplies
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import Waiter
from shoal.jobs.submission import fingerprint
from shoal.pool.api import list_pools
from shoal.pool.backends.local.gpus import ALL
from shoal.pool.options.base import is_pool_name
from shoal.pool.reconciling import reconcile
from shoal.secrets.redaction import redact_value
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import JobState, Pool, PoolState
from shoal.training.pytorch.request import FunctionResult
from tests.support.fake_ray_head import FakeHead
from tests.support.job_results import result_of
from tests.support.job_store import POOL, add_node
from tests.support.pool_processes import node_rows, nothing_left
from tests.support.waiting import wait_until

FRAME = pd.DataFrame({"x": range(1000), "y": range(1000)})
TRAINING: dict[str, Any] = {"dataset": {"paths": ["/rows"]}, "input_cols": ("x",), "label_col": "y"}
ANSWER = FunctionResult(("first", "second"), {"loss": 0.5}, "/model", 2, 0, 1.0, ())


@pytest.fixture
def on_pool(outside: None, store: Store, head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The config of calls on a pool whose head is a small HTTP server: their jobs are sent, and no driver starts."""
    for module in ("submission", "reconcile.look"):
        monkeypatch.setattr(f"shoal.jobs.{module}.pool_endpoint", lambda pool, store: head.endpoint)
    monkeypatch.setattr("shoal.pool.waiting.WAIT_PERIOD", 0.01)
    add_node(store, cpus=4)
    return RunConfig(pool_name=POOL)


def ends(job_id: str, location: str | None = None) -> None:
    """A driver stores the results of a function, and ends."""
    store, key = Store(), Key(job_id, 1)
    path, digest = artifacts.save_results(artifacts.folder(key, location), artifacts.claim_of(store, key), ANSWER)
    result = result_of(job_id=job_id, results_path=redact_value(path)).model_dump(mode="json")
    assert attempts.end(store, key, JobState.SUCCEEDED, 0.0, result=result, results_digest=digest)


def submitted(kind: str, config: RunConfig) -> SubmittedCall[Any]:
    """A call of each kind."""
    if kind == "PyTorchDistributor":
        return PyTorchDistributor(abs, run_config=config).submit(-1)
    if kind == "TorchDistributor":
        return TorchDistributor(2, use_gpu=False, run_config=config).submit(abs, -1)
    decorate = {"distributed": distributed, "ray_launch": ray_launch}[kind]
    return decorate(remote=True, run_config=config)(abs).submit(-1)


@pytest.mark.parametrize("kind", ["PyTorchDistributor", "TorchDistributor", "distributed", "ray_launch"])
def test_a_call_returns_the_same_to_its_process_and_to_any_other(kind, on_pool, monkeypatch):
    monkeypatch.setattr("shoal.distributors.call_pool._leased_for_job", lambda *_: nullcontext())
    call = submitted(kind, on_pool)
    row = attempts.load(Store(), Key(call.job_id, 1))
    assert (call.status().state, row.orphan_after) == (JobState.PENDING, None)
    assert call.job_id.startswith("pytorch-")
    assert "job_id" not in row.spec["run_config"] or row.spec["run_config"]["job_id"] is None
    ends(call.job_id)

    expected = {"TorchDistributor": "first", "distributed": ["first", "second"], "ray_launch": "first"}
    assert call.result() == expected.get(kind, Response(ANSWER))
    assert attach(call.job_id).result() == call.result()
    assert asyncio.run(_awaited(attach(call.job_id))) == call.result()


def test_another_process_gives_the_credentials_of_the_location_to_read_the_result(on_pool):
    location = "memory://user:s3cret@bucket/models"
    call = submitted("PyTorchDistributor", on_pool.model_copy(update={"artifact_location": location}))
    ends(call.job_id, location)
    with pytest.raises(FileNotFoundError) as caught:
        attach(call.job_id).result()
    assert f'pass this location to attach("{call.job_id}", artifact_location=...)' in caught.value.__notes__[0]
    with pytest.raises(
        InvalidArgumentError, match=f"is not the location of job {call.job_id}, whose files are in memory://"
    ):
        attach(call.job_id, artifact_location=f"{location}-2")
    assert attach(call.job_id, artifact_location=f"{location}/").result() == call.result() == Response(ANSWER)


def test_the_kind_of_a_calls_value_is_no_part_of_the_jobs_identity(on_pool):
    call = submitted("TorchDistributor", on_pool)
    document = attempts.load(Store(), Key(call.job_id, 1)).spec
    spec = parse_spec(document)
    assert document["returns"] == "rank-0"
    plain = spec.model_copy(update={"returns": None})
    assert fingerprint(spec) == fingerprint(plain)


def test_orphan_after_counts_only_if_it_is_given(on_pool):
    config = on_pool.model_copy(update={"orphan_after": 60.0, "job_id": "mine"})
    call = submitted("PyTorchDistributor", config)
    assert (call.job_id, attempts.load(Store(), Key("mine", 1)).orphan_after) == ("mine", 60.0)
    assert submitted("PyTorchDistributor", config).job.attempt == 1  # the same job is found again
    with pytest.raises(JobNotFoundError, match='job "yours" does not exist'):
        attach("yours")


def test_a_call_that_waits_and_one_that_does_not_are_the_same_job(on_pool, monkeypatch):
    monkeypatch.setattr(SubmittedCall, "result", lambda call, **_: call)
    for number, waits_first in enumerate((True, False)):
        config = on_pool.model_copy(update={"job_id": f"nightly-{number}"})
        distributor = PyTorchDistributor(abs, run_config=config)
        calls = [distributor.run, distributor.submit] if waits_first else [distributor.submit, distributor.run]
        assert [call(-1).job.attempt for call in calls] == [1, 1]
        # From then on, the job goes on without a process that polls it.
        assert attempts.load(Store(), Key(f"nightly-{number}", 1)).orphan_after is None


def test_a_job_that_was_recorded_is_returned_or_named(on_pool, monkeypatch):
    send = acts.send

    def unreachable(*_: Any) -> None:
        raise StoreUnreachableError("the store is away")

    def away_after_it_was_sent(target: Target, supplies: Supplies) -> bool:
        is_sent = send(target, supplies)
        monkeypatch.setattr(attempts, "load", unreachable)
        return is_sent

    monkeypatch.setattr(acts, "send", away_after_it_was_sent)
    with monkeypatch.context() as away:
        away.setattr(attempts, "load", attempts.load)  # undone at the end
        call = submitted("PyTorchDistributor", on_pool)
    assert call.status().state is JobState.PENDING

    monkeypatch.setattr(acts, "send", lambda target, supplies: False)
    monkeypatch.setattr(Waiter, "round", unreachable)
    with pytest.raises(StoreUnreachableError) as caught:
        submitted("PyTorchDistributor", on_pool.model_copy(update={"job_id": "named"}))
    assert caught.value.__notes__ == [
        "job \"named\" was recorded before this error, and may run: shoal.jobs.attach('named') finds it, and "
        "`shoal jobs cancel named` ends it"
    ]
    assert attach("named").job.attempt == 1


def test_two_ids_for_one_job_are_refused(on_pool):
    spec = JobSpec(**TRAINING, run_config=on_pool.model_copy(update={"job_id": "yours"}))
    with pytest.raises(InvalidArgumentError, match=r'job_id="mine" and run_config\.job_id="yours" differ'):
        submission.submit(spec, job_id="mine")


def test_a_wait_that_ends_early_leaves_the_job_alone(on_pool, monkeypatch):
    call = submitted("PyTorchDistributor", on_pool)
    with pytest.raises(JobTimeoutError, match="The job goes on"):
        call.result(timeout=0.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(call.job, "target", replace(call.job.target, sleep=interrupted))
        with pytest.raises(KeyboardInterrupt):
            call.result()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(_awaited(call), 0.05))
    assert call.status().state is JobState.PENDING
    assert call.cancel("enough") is True
    with pytest.raises(JobCancelledError, match="enough"):
        call.result()


def test_an_event_loop_goes_on_while_many_calls_are_awaited(on_pool):
    call = submitted("PyTorchDistributor", on_pool)

    async def end_the_job() -> None:
        ends(call.job_id)

    async def everything() -> list[Any]:
        # The job ends only after all of them wait for it, more than asyncio has threads.
        return await asyncio.gather(*(attach(call.job_id) for _ in range(40)), call.job, end_the_job())

    *values, result, _ = asyncio.run(everything())
    assert values == [Response(ANSWER)] * 40
    assert result.job_id == call.job_id


def test_a_dataframe_stays_staged_until_the_job_has_ended(on_pool):
    estimator = XGBEstimator(run_config=on_pool)
    call = estimator.submit(FRAME, ["x"], "y", eval_set=FRAME)
    staged = home() / "staging"
    assert len(list(staged.iterdir())) == 2
    with pytest.raises(InvalidArgumentError, match=r"call result\(\) of the handle that submit\(\) returned"):
        estimator.get_booster()
    call.cancel()
    assert list(staged.iterdir()) == []


def test_what_is_wrong_is_refused_and_its_dataframe_removed(on_pool):
    with pytest.raises(InvalidArgumentError, match="also in input_cols"):
        XGBEstimator(run_config=on_pool).submit(FRAME, ["x"], "x")
    assert list((home() / "staging").iterdir()) == []


def test_in_a_ray_cluster_a_submission_is_refused_before_anything_starts(fresh_home, monkeypatch):
    monkeypatch.setattr("shoal.distributors.call.is_connected", lambda: True)
    rows = DataConnector.from_parquet("/rows")
    for refused in (
        lambda: XGBEstimator().submit(FRAME, ["x"], "y"),
        lambda: submit_predict("models:/delays@champion", rows, "/out"),
        *(lambda kind=kind: submitted(kind, RunConfig()) for kind in ("PyTorchDistributor", "distributed")),
    ):
        with pytest.raises(InvalidArgumentError, match="Ray cluster, where calls do not run as jobs: call fit"):
            refused()
    assert not (home() / "staging").exists()
    assert list_pools() == []


def test_in_a_ray_cluster_expectations_of_a_spec_are_refused(fresh_home, monkeypatch):
    """No driver would check them."""
    monkeypatch.setattr("shoal.distributors.call.is_connected", lambda: True)
    rows = DataConnector.from_spec({"paths": ["/rows"], "expect": {"rows": {"min": 1}}})
    with pytest.raises(InvalidArgumentError, match="option expect, which only a job checks"):
        XGBEstimator().fit(rows, ["x"], "y")


@pytest.fixture
def sent(outside: None, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on pools of tiny nodes, which have no head: each job counts as sent."""
    monkeypatch.setattr(acts, "send", lambda target, supplies: True)


def test_nodes_are_leased_for_as_long_as_the_job(sent, capsys):
    pool = ComputePool("local://named?max_nodes=3&cpus_per_node=2").up()
    pool.down()
    call = distributed(num_workers=3, remote=True, run_config=RunConfig(pool_name="named"))(abs).submit(-1)
    assert [(lease.holder, lease.size) for lease in pool.describe().leases] == [(f"job:{call.job_id}", 2)]
    assert len(pool.get_nodes()) == 2
    assert reconcile(Store(), "named").decided == ()
    ends(call.job_id)
    wait_until(lambda: reconcile(Store(), "named") and pool.describe().state == "down", "the pool's end")
    nothing_left()
    assert capsys.readouterr() == ("", "")


def test_a_refused_submission_leaves_the_running_job_its_nodes(sent):
    pool = ComputePool("local://named?max_nodes=3&cpus_per_node=2").up()
    config = RunConfig(pool_name="named", job_id="nightly")
    call = distributed(num_workers=3, remote=True, run_config=config)(abs).submit(-1)
    with pytest.raises(JobBusyError, match='"nightly" is pending with another spec'):
        distributed(num_workers=2, remote=True, run_config=config)(abs).submit(-1)
    reconcile(Store(), "named")
    assert [(lease.holder, lease.size) for lease in pool.describe().leases] == [("job:nightly", 2)]
    attempts.end(Store(), Key(call.job_id, 1), JobState.FAILED, 0.0)
    pool.down()
    with pytest.raises(InvalidArgumentError, match=r'run_config.job_id "my job" is not legal'):
        distributed(remote=True, run_config=RunConfig(job_id="my job"))(abs).submit(-1)
    nothing_left()


def test_a_call_without_a_pool_has_one_that_ends_with_the_job(sent, capsys):
    call = XGBEstimator().submit(FRAME, ["x"], "y")
    assert f"job {call.job_id} runs on a pool of its own" in capsys.readouterr().err
    name = call.job.pool
    assert name == f"embedded-{call.job_id}"
    assert list_pools() == []
    assert reconcile(Store(), name).decided == ()
    assert len(node_rows()) == 1
    attempts.end(Store(), Key(call.job_id, 1), JobState.FAILED, 0.0)
    wait_until(lambda: reconcile(Store(), name) and ComputePool(name).describe().state == "down", "the pool's end")
    nothing_left()


def test_a_second_call_waits_until_the_pool_of_the_first_has_released_the_gpus(sent, gpu_machine, monkeypatch, capsys):
    gpu_machine(2)
    named = RunConfig(job_id="first")
    first = distributed(run_config=named)(abs).submit(-1)
    assert gpus_of_pool(first) == 2
    assert distributed(run_config=named)(abs).submit(-1).job.pool == first.job.pool  # the same job has its GPUs already

    def first_ends(_: float) -> None:
        said.append(capsys.readouterr().err)
        ended_with_its_pool(first)

    said: list[str] = []
    pauses = SimpleNamespace(monotonic=time.monotonic, sleep=first_ends)
    monkeypatch.setattr("shoal.pool.backends.local.gpus.time", pauses)
    plain = XGBEstimator(scaling_config=XGBScalingConfig(use_gpu=False)).submit(FRAME, ["x"], "y")
    assert (gpus_of_pool(plain), said) == (0, [])  # it uses no GPU, so it does not wait for one
    second = distributed()(abs).submit(-1)
    assert len(said) == 1
    assert "waiting for the GPUs of this machine, which the embedded pools of other calls have claimed: " in said[0]
    assert first.job.pool in said[0]
    assert gpus_of_pool(second) == 2
    assert "WARNING" not in capsys.readouterr().err
    limited = RunConfig(timeout=1e-9)
    with pytest.raises(CapacityTimeoutError, match=f"within 1e-09 s .*have claimed them: {second.job.pool}"):
        distributed(run_config=limited)(abs).submit(-1)
    ended_with_its_pool(plain)
    ended_with_its_pool(second)
    nothing_left()


def test_a_call_without_a_gpu_names_the_pool_that_has_them_all(sent, gpu_machine, capsys):
    gpu_machine(1)
    ComputePool("local://idle?gpus_per_node=-1").up()
    call = distributed()(abs).submit(-1)  # does not wait: the pool may stay up for ever
    assert "WARNING: this call has no GPU, and runs on the CPUs: all GPUs of this machine are claimed (idle)" in (
        capsys.readouterr().err
    )
    ended_with_its_pool(call)


def gpus_of_pool(call: SubmittedCall[Any]) -> int:
    return ComputePool(call.job.pool).get_nodes()[0]["gpus"]


def ended_with_its_pool(call: SubmittedCall[Any]) -> None:
    """Without a reconciler, the test itself takes the pool of a job down."""
    attempts.end(Store(), Key(call.job_id, call.job.attempt), JobState.FAILED, 0.0)
    pool = ComputePool(call.job.pool)
    wait_until(lambda: reconcile(Store(), pool.name) and pool.describe().state == "down", "the pool's end")


@pytest.mark.parametrize(
    ("request_", "gpus"),
    [
        (JobSpec(**TRAINING), ALL),
        (JobSpec(**TRAINING, scaling_config=XGBScalingConfig(use_gpu=False)), 0),
        (JobSpec(**TRAINING, params={"device": "cuda"}), ALL),
        (JobSpec(**TRAINING, framework="lightgbm"), 0),
        (FunctionJobSpec(train_func="pkg.module:f"), 0),
        (FunctionJobSpec(train_func="pkg.module:f", scaling_config=PyTorchScalingConfig(num_workers_per_node=-1)), ALL),
        (PredictJobSpec(model="models:/m/1", dataset=TRAINING["dataset"], output_path="/out"), 0),
    ],
)
def test_only_a_job_that_may_use_gpus_asks_for_them(request_, gpus, monkeypatch):
    monkeypatch.setattr("shoal.distributors.call_pool.may_be_contended", lambda _: True)
    monkeypatch.setattr("shoal.training.xgboost.params.has_cuda", lambda: True)
    assert gpus_of(request_.demand()) == gpus
    monkeypatch.setattr("shoal.training.xgboost.params.has_cuda", lambda: False)
    assert gpus_of(JobSpec(**TRAINING).demand()) == 0


def test_jobs_share_no_embedded_pool_and_a_smaller_one_is_replaced(sent):
    ids = ["a.b", "a_b", "a-b", "A-b", "x" * 60, "x" * 61]
    names = [pool_of_job(job_id) for job_id in ids]
    assert len({*names}) == len(ids)
    assert names[2] == "embedded-a-b"
    assert all(map(is_pool_name, names))

    def submitted_with(cpus: int) -> SubmittedCall[Any]:
        return distributed(num_cpus=cpus, remote=True, run_config=RunConfig(job_id="nightly"))(abs).submit(-1)

    first, own = submitted_with(1), len(os.sched_getaffinity(0))
    assert ComputePool(first.job.pool).get_nodes()[0]["cpus"] == own
    with pytest.raises(JobBusyError):
        submitted_with(own + 1)
    attempts.end(Store(), Key("nightly", 1), JobState.FAILED, 0.0)
    second = submitted_with(own + 1)  # before the pool of the first attempt has gone down
    assert (second.job.attempt, ComputePool(first.job.pool).get_nodes()[0]["cpus"]) == (2, own + 1)
    ended_with_its_pool(second)
    nothing_left()


def test_a_submission_that_fails_leaves_no_pool_up(sent, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise InvalidArgumentError("refused")

    monkeypatch.setattr(submission.attempts, "ask", refused)
    with pytest.raises(InvalidArgumentError, match="refused"):
        distributed()(abs).submit(-1)
    with Store().reading() as session:
        assert [pool.state for pool in session.scalars(select(Pool))] == [PoolState.DOWN]
    nothing_left()


SUBMITS = """
import sys, time
import pandas as pd
from pathlib import Path
from shoal import RunConfig
from shoal.distributors import distributed
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig

config = RunConfig(pool_name=sys.argv[1] or None)
frame = pd.DataFrame({"x": range(1000), "y": range(1000)})

def place(flag):
    import os
    while not Path(flag).exists():
        time.sleep(0.05)
    return os.environ["RANK"], os.environ["PWD"]

called = distributed(num_workers=2, num_cpus=1, remote=True, run_config=config)(place).submit(sys.argv[2])
# The node that was leased for the function may go while this training starts there.
again = RunConfig(pool_name=config.pool_name, max_restarts=1)
one = XGBScalingConfig(num_workers=1)
fitted = XGBEstimator(5, scaling_config=one, run_config=again).submit(frame, ["x"], "y") if sys.argv[1] else called
print(called.job_id, fitted.job_id, flush=True)
input()
"""


def killed_after_submitting(pool: str, flag: Path) -> list[str]:
    """Submit in a process that is then killed, and return the ids of the two jobs."""
    child = subprocess.Popen(
        [sys.executable, "-c", SUBMITS, pool, str(flag)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=flag.parent,
    )  # fmt: skip
    assert child.stdout is not None
    ids = child.stdout.readline().split()
    child.kill()
    child.wait()
    assert len(ids) == 2
    return ids


@pytest.mark.ray
def test_another_process_gets_the_results_after_the_submitter_was_killed(outside, real_pool, tmp_path):
    import xgboost

    real_pool.scale(1)
    called, fitted = killed_after_submitting(real_pool.name, tmp_path / "flag")
    assert [(lease.holder, lease.size) for lease in real_pool.describe().leases] == [(f"job:{called}", 2)]

    async def let_it_end() -> None:
        (tmp_path / "flag").touch()

    async def everything() -> list[Any]:
        return await asyncio.gather(attach(called), attach(fitted), let_it_end())

    (first, second), booster, _ = asyncio.run(everything())
    assert (first[0], second[0]) == ("0", "1")
    assert isinstance(booster, xgboost.Booster)
    assert booster.feature_names == ["x"]
    assert any(f"job {fitted}, attempt 1" in line for line in attach(fitted).logs())
    wait_until(lambda: real_pool.describe().leases == () and len(real_pool.get_nodes()) == 1, "the end of the lease")
    wait_until(lambda: list((home() / "staging").iterdir()) == [], "the end of the staged rows")


@pytest.mark.ray
@pytest.mark.long
def test_an_embedded_pool_goes_down_by_itself_after_its_job(outside, fresh_home, tmp_path):
    called, _ = killed_after_submitting("", tmp_path / "flag")
    call = attach(called)
    assert [lease.holder for lease in ComputePool(call.job.pool).describe().leases] == [f"job:{called}"]
    (tmp_path / "flag").touch()
    assert call.result() == [("0", str(tmp_path)), ("1", str(tmp_path))]
    wait_until(lambda: not node_rows(), "the end of the pool")
    nothing_left()


async def _awaited(call: SubmittedCall[Any]) -> Any:
    return await call
