"""Stores as the page shows them: an idle, a busy and a broken system, a large one, and one with hostile names.

The pools are bound to another host, so that no process on this machine is looked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from shoal.jobs.files.logs import log_path
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.metric_points import MetricPoint, encoded
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import (
    Demand,
    Job,
    JobMetrics,
    JobState,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationKind,
    OperationState,
    Pool,
    PoolState,
    Promotion,
    PromotionState,
    Size,
)
from tests.support.job_results import result_of

HOST = "gpu-box-1"
HOSTILE = "<img src=x onerror=alert(1)>"

SPEC: dict[str, Any] = {
    "framework": "xgboost",
    "dataset": {"paths": ["s3://flights/2025/"]},
    "input_cols": ["distance", "hour"],
    "label_col": "arr_delay",
    "n_estimators": 200,
    "params": {"objective": "reg:squarederror"},
    "register": {"model": "flight-delays", "metric": "rmse", "holdout": {"paths": ["s3://flights/holdout/"]}},
    "tracking": {"uri": "http://mlflow.internal:5000"},
    "fingerprint": "q",
}


def pool(name: str, *, state: PoolState = PoolState.UP, size: int = 0, most: int = 4, **columns: Any) -> list[Any]:
    """The rows of a pool and its base demand."""
    row = Pool(
        name=name,
        spec=PoolSpec(name=name, max_nodes=most).model_dump(),
        state=state,
        host=HOST,
        host_id="another",
        min_nodes=1,
        max_nodes=most,
        epoch=1,
        next_node=9,
        created_at=0.0,
        touched_at=time.time(),
        seen_at=time.time(),
        **columns,
    )
    demand = [Demand(pool=name, size=size, operation_id=None, set_at=time.time())] if size else []
    return [row, *demand]


def node(of: str, number: int, state: NodeState = NodeState.READY, **columns: Any) -> Node:
    """The row of a node."""
    plain = {
        "id": f"{of}-{number}",
        "pool": of,
        "name": f"{of}-{number}",
        "is_head": number == 0,
        "state": state,
        "epoch": 1,
        "cpus": 8,
        "gpus": 0,
        "busy": False,
        "start_deadline": 0.0,
        "created_at": float(number),
    }
    return Node(**{**plain, **columns})


def lease(of: str, holder: str, size: int, **columns: Any) -> Lease:
    """The row of a lease."""
    plain = {
        "id": f"{of}-{holder}"[:200],
        "pool": of,
        "holder": holder,
        "size": size,
        "epoch": 1,
        "ttl": 900.0,
        "expires_at": time.time() + 840,
        "created_at": time.time() - 300,
    }
    return Lease(**{**plain, **columns})


def operation(
    of: str, kind: OperationKind, state: OperationState, size: int, ago: float, took: float | None, **columns: Any
) -> Operation:
    """The row of an operation."""
    at = time.time() - ago
    plain = {
        "id": f"{of}-{kind}-{ago}",
        "pool": of,
        "kind": kind,
        "state": state,
        "holder": "airflow:retrain_flights/scheduled__2026-11-23",
        "size": size,
        "deadline": at + 720,
        "failures": 0,
        "node_errors": {},
        "created_at": at,
        "ended_at": None if took is None else at + took,
    }
    return Operation(**{**plain, **columns})


def job(job_id: str, of: str, state: JobState, ago: float, **columns: Any) -> Job:
    """The row of an attempt that was created some seconds ago."""
    at = time.time() - ago
    started = None if state is JobState.PENDING else at + 12
    ended = at + 240 if state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED) else None
    plain = {
        "id": job_id,
        "attempt": 1,
        "pool": of,
        "holder": "airflow:retrain_flights/scheduled__2026-11-23",
        "spec": SPEC,
        "state": state,
        "endpoint": {},
        "last_polled_at": at,
        "created_at": at,
        "queued_at": at,
        "started_at": started,
        "admitted_at": None if started is None else at + 4,
        "ended_at": ended,
    }
    return Job(**{**plain, **columns})


def write(store: Store, *rows: Any) -> None:
    """Write rows; those of pools first, which others refer to. A promotion by a job that is not there has no
    attempt."""
    jobs = {row.id for row in rows if isinstance(row, Job)}
    for row in rows:
        if isinstance(row, Promotion) and row.job_id not in jobs:
            row.attempt = None
    with store.transaction() as session:
        session.add_all([row for row in rows if isinstance(row, Pool)])
        session.flush()
        session.add_all([row for row in rows if not isinstance(row, Pool)])


def search(store: Store) -> Key:
    """A search whose winner is being trained: six trials have ended, one of them without a value. A choice has a
    hostile name."""
    import optuna

    from shoal.kinds.search.study_storage import ERROR, NUMBER, PARAMS, STUDY, StudyJournal, storage_of

    spec = {**SPEC, "framework": "tune", "direction": "minimize", "fingerprint": "q"}
    row = job("a-search", "retrain", JobState.RUNNING, 60, spec=spec, progress=progress(2))
    write(store, row, metrics("a-search", [0, 2, 3, 4, 5], ["trial-value"]))
    key = Key("a-search", 1)
    storage = storage_of(StudyJournal(store, key, 1))
    study = optuna.create_study(storage=storage, study_name=STUDY, sampler=optuna.samplers.RandomSampler(seed=0))
    for number in range(6):
        trial = study.ask()
        trial.set_user_attr(NUMBER, number)
        eta, kind = trial.suggest_float("eta", 0, 1), trial.suggest_categorical("kind", ["a", HOSTILE])
        trial.set_user_attr(PARAMS, trial.params)
        if number == 1:
            trial.set_user_attr(ERROR, HOSTILE)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, eta + (kind == "a") / 100)
    return key


def sizes(of: str, *points: tuple[float, int | None, int | None]) -> list[Size]:
    """The recorded sizes of a pool: for each, how many seconds ago, the ready and the demanded nodes."""
    return [Size(pool=of, at=time.time() - ago, ready=ready, target=target) for ago, ready, target in points]


def set_log(key: Key, lines: Iterable[str]) -> None:
    """Write the log of an attempt."""
    path = log_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def progress(done: int, total: int | None = 200, unit: str = "rounds") -> dict[str, Any]:
    """The progress of a training whose error falls."""
    rmse = 38.0 + 20 * math.exp(-done / 40)
    return {"done": done, "total": total, "unit": unit, "metrics": {"eval-rmse": rmse, "eval-mae": rmse * 0.62}}


def metrics(job_id: str, steps: Iterable[int], names: Iterable[str] = ("eval-rmse", "eval-mae")) -> JobMetrics:
    """The series of metrics of a job, whose error falls."""
    values = {step: progress(step)["metrics"] for step in steps}
    points = [
        MetricPoint(step, float(step), {name: at.get(name, at["eval-rmse"]) for name in names})
        for step, at in values.items()
    ]
    return JobMetrics(job_id=job_id, attempt=1, seq=0, generation=0, points=encoded(points))


def idle(store: Store) -> None:
    """A pool that is up with one node, a pool that is down, and jobs that have succeeded."""
    write(
        store,
        *pool("retrain", size=1),
        node("retrain", 0),
        operation("retrain", OperationKind.UP, OperationState.SUCCEEDED, 1, 7_200, 9.0),
        *pool("nightly-gpu", state=PoolState.DOWN, most=8),
        *(
            job(f"flights-{number}", "retrain", JobState.SUCCEEDED, 86_400 * number + 3_000, result=_result(number))
            for number in range(1, 6)
        ),
        *_promotions(),
    )


def busy(store: Store) -> None:
    """Pools of several sizes, jobs that run and wait."""
    on = OperationState
    write(
        store,
        *pool("retrain", size=3, most=6),
        node("retrain", 0, busy=True),
        node("retrain", 1, busy=True),
        node("retrain", 2, busy=True),
        node("retrain", 3, NodeState.STARTING),
        node("retrain", 4, NodeState.PLANNED),
        lease("retrain", "airflow:retrain_flights/scheduled__2026-11-23", 5),
        lease(
            "retrain", "prefect:3f0c2a9e-77aa-4c0e-8d5b-2f6f6f1c9f11", 3, exclusive=True, waiting=True, queue_number=7
        ),
        operation("retrain", OperationKind.UP, on.SUCCEEDED, 1, 5_400, 11.0),
        operation("retrain", OperationKind.SCALE, on.SUCCEEDED, 3, 3_000, 24.0),
        operation("retrain", OperationKind.SCALE, on.SUPERSEDED, 6, 2_200, 14.0),
        operation("retrain", OperationKind.LEASE, on.OPEN, 5, 20, None),
        *sizes("retrain", (5_400, 0, 1), (5_389, 1, 1), (4_400, 1, 1), (4_400, None, None), (3_700, 1, 1)),
        *sizes("retrain", (3_000, 1, 3), (2_988, 2, 3), (2_976, 3, 3), (2_200, 3, 6), (2_186, 3, 3), (20, 3, 5)),
        *pool("features", size=2),
        node("features", 0),
        node("features", 1, busy=True),
        lease("features", "python:anna@workbench/4711", 2),
        *pool("nightly-gpu", size=8, most=8),
        *(node("nightly-gpu", number, busy=number < 6, gpus=2) for number in range(7)),
        node("nightly-gpu", 7, NodeState.DRAINING, gpus=2),
        *pool("sandbox", state=PoolState.DOWN, most=2),
        job("flights-2026-11-23", "retrain", JobState.RUNNING, 190, progress=progress(86), mlflow_run_id="6f1c9d0e"),
        metrics("flights-2026-11-23", [85]),
        job("digits-cnn", "nightly-gpu", JobState.RUNNING, 2_700, progress=progress(4_120, None, "steps")),
        job(
            "score-customers",
            "features",
            JobState.RUNNING,
            75,
            progress={"done": 1_250_000, "total": 4_000_000, "unit": "rows", "metrics": {}},
        ),
        job("flights-emea", "retrain", JobState.PENDING, 60, gang={"workers": 3, "cpus": 8, "gpus": 0}),
        job(
            "flights-apac",
            "retrain",
            JobState.PENDING,
            45,
            gang={"workers": 3, "cpus": 8, "gpus": 0},
            holder="prefect:3f0c2a9e-77aa-4c0e-8d5b-2f6f6f1c9f11",
        ),
        *(
            job(f"flights-{number}", "retrain", JobState.SUCCEEDED, 86_400 * number, result=_result(number))
            for number in range(1, 4)
        ),
        *_promotions(),
    )
    set_log(
        Key("flights-2026-11-23", 1),
        [
            "reading 24 row groups of 2,014,933 rows on 3 workers",
            "worker 0 on retrain-0: 671,645 rows, quantised in 4.1 s",
        ]
        + [f"round {done} of 200, eval-rmse: {38 + 20 * math.exp(-done / 40):.5g}" for done in range(10, 90, 10)],
    )


def broken(store: Store) -> None:
    """Nodes that do not start, jobs that fail."""
    why = "the raylet exited with code 1: No space left on device: '/dev/shm/ray' (needed 2.1 GiB, free 0.3 GiB)"
    write(
        store,
        *pool("retrain", size=3),
        node("retrain", 0),
        node("retrain", 1, NodeState.FAILED, error=why),
        node("retrain", 2, NodeState.FAILED, error=why),
        operation("retrain", OperationKind.UP, OperationState.SUCCEEDED, 1, 5_400, 11.0),
        operation(
            "retrain",
            OperationKind.SCALE,
            OperationState.ROLLED_BACK,
            3,
            900,
            724.0,
            error=f"2 of 3 nodes were not ready after 720 s, so the size is 1 again; retrain-1: {why}",
        ),
        operation("retrain", OperationKind.SCALE, OperationState.OPEN, 3, 60, None, holder="cli:anna@workbench"),
        *sizes("retrain", (5_400, 0, 1), (5_389, 1, 1), (900, 1, 3), (176, 1, 1), (60, 1, 3)),
        *pool(
            "nightly-gpu",
            size=4,
            most=8,
            start_failures=3,
            last_failure="no GPU is free",
            cooldown_until=time.time() + 200,
        ),
        node("nightly-gpu", 0, gpus=2),
        *pool("features", size=1),
        node("features", 0),
        job(
            "flights-2026-11-23",
            "retrain",
            JobState.FAILED,
            1_300,
            task_key="train/-1",
            progress=progress(41),
            error="column 'dep_delay' of s3://flights/2025/part-07.parquet, row group 3: 12 infinite values "
            "(row 88,112 is the first)\n\n"
            "XGBoost refuses infinite values: replace them, or drop the rows before the training.",
        ),
        job(
            "digits-cnn",
            "nightly-gpu",
            JobState.FAILED,
            4_000,
            task_key="digits/-1",
            error="rank 2 of 4 failed: CUDA out of memory: tried to allocate 3.2 GiB",
        ),
        job("score-customers", "features", JobState.CANCELLED, 7_000, error="cancelled by anna on shoal's page"),
    )
    set_log(
        Key("flights-2026-11-23", 1),
        [
            "reading 24 row groups of 2,014,933 rows on 3 workers",
            "round 40 of 200, eval-rmse: 45.36",
            "DataError: column 'dep_delay', row group 3: 12 infinite values",
        ],
    )


def hostile(store: Store) -> None:
    """Names and errors that are HTML."""
    write(
        store,
        *pool("retrain", size=1),
        node("retrain", 0, NodeState.FAILED, error=HOSTILE),
        lease("retrain", f"airflow:{HOSTILE}/run", 1),
        operation(
            "retrain", OperationKind.SCALE, OperationState.ROLLED_BACK, 2, 60, 30.0, error=HOSTILE, holder=HOSTILE
        ),
        job(
            "job-1",
            "retrain",
            JobState.FAILED,
            500,
            error=HOSTILE,
            holder=HOSTILE,
            progress={"done": 1, "total": 2, "unit": "steps", "metrics": {HOSTILE: 1.0}},
        ),
        job(
            "job-2",
            HOSTILE,
            JobState.RUNNING,
            500,
            progress={"done": 1, "total": 2, "unit": "steps", "metrics": {HOSTILE: 1.0}},
        ),
        metrics("job-1", [0, 1], [HOSTILE]),
        metrics("job-2", [0, 1], [HOSTILE]),
        _promotion(1, HOSTILE, 2.0, 3_600),
        _promotion(2, HOSTILE, 1.0, 60),
    )
    set_log(Key("job-1", 1), [HOSTILE])


def large(store: Store, pools: int = 50, jobs: int = 5_000) -> None:
    """Many pools of four nodes each, and many jobs, most of which have ended."""
    rows: list[Any] = []
    for number in range(pools):
        name = f"pool-{number:02}"
        rows += [
            *pool(name, size=4, most=8),
            *(node(name, each) for each in range(4)),
            lease(name, f"airflow:dag/{number}", 3),
        ]
        rows += [
            operation(name, OperationKind.SCALE, OperationState.SUCCEEDED, 4, 100.0 * each + 1, 9.0)
            for each in range(20)
        ]
    for number in range(jobs):
        state = [JobState.SUCCEEDED, JobState.FAILED, JobState.RUNNING][0 if number % 50 else 1 if number % 100 else 2]
        result = _result(number) if state is JobState.SUCCEEDED else None
        error = "out of memory" if state is JobState.FAILED else None
        rows.append(job(f"job-{number}", f"pool-{number % pools:02}", state, 60.0 * number, result=result, error=error))
    write(store, *rows)


def _result(number: int) -> dict[str, Any]:
    return result_of(
        job_id=f"flights-{number}",
        model_path=f"/nowhere/{number}/model.ubj",
        rows=2_014_933,
        num_workers=3,
        seconds=221.0,
        metrics={"holdout-rmse": 39.4 + number / 10, "eval-rmse": 38.1},
        model_version=str(20 - number),
        promoted=number % 2 == 1,
        peak_memory_per_worker=(1_503_238_553, 1_476_395_008, 1_610_612_736),
        decision={
            "reason": "better",
            "sentence": f"rmse 39.{number} is better than the champion's 40.2 on the same 50,000 rows",
        },
    ).document()


def _promotions() -> list[Promotion]:
    return [_promotion(number, "flight-delays", 42.5 - number * 0.4, 86_400.0 * (9 - number)) for number in range(1, 9)]


def _promotion(number: int, model: str, value: float, ago: float) -> Promotion:
    at = time.time() - ago
    return Promotion(
        registry_uri="http://mlflow.internal:5000",
        model=model,
        alias="champion",
        version=str(number),
        metric="rmse",
        value=value,
        holdout_digest="d" * 32,
        job_id=f"flights-{9 - number}",
        attempt=1,
        state=PromotionState.CONFIRMED,
        previous=str(number - 1) if number > 1 else None,
        created_at=at,
        confirmed_at=at,
    )
