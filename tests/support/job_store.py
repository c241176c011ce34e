"""Fixtures: a store with a pool that is up, a head that is an HTTP server, the spec of a small job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.data.dataset_spec import DatasetSpec
from shoal.kinds.training.spec import JobSpec
from shoal.os_processes import ProcessId, host_id, hostname
from shoal.pool import bound_host
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Node, NodeState, Pool, PoolState
from tests.support.fake_ray_head import FakeHead

POOL = "retrain"


def add_pool(store: Store, name: str = POOL, owner: ProcessId | None = None) -> None:
    """A pool that is up, and that this home has recorded; an embedded pool if it belongs to a process."""
    bound_host.record(PoolSpec(name=name))
    with store.transaction() as session:
        session.add(
            Pool(
                name=name,
                owner=owner and owner.to_json(),
                spec=PoolSpec(name=name).model_dump(),
                state=PoolState.UP,
                host=hostname(),
                host_id=host_id(),
                min_nodes=1,
                max_nodes=4,
                epoch=1,
                next_node=1,
                created_at=0.0,
                touched_at=0.0,
            )
        )


def change_pool(store: Store, spec: PoolSpec) -> None:
    """Give the pool other settings, and record them in this home."""
    bound_host.record(spec)
    with store.transaction() as session:
        session.get_one(Pool, spec.name).spec = spec.model_dump()


def add_node(store: Store, cpus: int) -> None:
    """A ready node, which gives the jobs room."""
    with store.transaction() as session:
        session.add(
            Node(
                id="0123456789", pool=POOL, name=f"{POOL}-0", is_head=True, state=NodeState.READY, epoch=1, cpus=cpus,
                gpus=0, endpoint={}, busy=False, start_deadline=0.0, created_at=0.0,
            )
        )  # fmt: skip


@pytest.fixture
def store(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with one pool that is up."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    store = Store()
    add_pool(store)
    return store


@pytest.fixture
def head(tmp_path: Path) -> Iterator[FakeHead]:
    head = FakeHead(tmp_path / "token")
    yield head
    head.close()


@pytest.fixture
def another_head(tmp_path: Path) -> Iterator[FakeHead]:
    head = FakeHead(tmp_path / "another-token")
    yield head
    head.close()


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec(dataset=DatasetSpec(paths=("/data/train",)), input_cols=("a", "b"), label_col="y")


@pytest.fixture(scope="session")
def mlflow_uri(mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow database for the session."""
    return f"sqlite:///{shutil.copy(mlflow_database, tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture
def own_mlflow(mlflow_database: Path, tmp_path: Path) -> str:
    """An MLflow database for one test."""
    return f"sqlite:///{shutil.copy(mlflow_database, tmp_path / 'mlflow.db')}"
