"""Rows that another writer of the store has planted: no process of this user starts, reads or asks anything."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.errors import NoPoolError, PoolElsewhereError, StoreError
from shoal.jobs.reconcile.rounds import settle_jobs
from shoal.os_processes import host_id, hostname
from shoal.pool import bound_host, reconciling
from shoal.pool.api import ComputePool, describe_pool, list_pools
from shoal.pool.options import missing
from shoal.pool.reconciling import sweep
from shoal.pool.selection import which_pool
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import Demand, Node, NodeState, Pool, PoolState


@pytest.fixture
def planted(fresh_home, monkeypatch) -> Callable[..., str]:
    """Add the rows of a pool that wants a node to the store, as anyone can who may write to it; returns its name."""
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)

    def add(uri: str, *, name: str | None = None, node: dict[str, str] | None = None) -> str:
        spec = PoolSpec.parse(uri)
        name = name or spec.name
        at = {"host": hostname(), "host_id": host_id()} if spec.backend == "local" else {"host": "", "host_id": None}
        with Store().transaction() as session:
            session.merge(
                Pool(
                    name=name, spec=spec.model_dump(mode="json"), state=PoolState.UP, min_nodes=1, max_nodes=4, epoch=1,
                    next_node=1, created_at=0.0, touched_at=9e9, **at,
                )
            )  # fmt: skip
            session.flush()
            session.merge(Demand(pool=name, size=1, operation_id=None, set_at=0.0))
            if node is not None:
                session.add(
                    Node(
                        id="0123456789", pool=name, name=f"{name}-0", is_head=True, state=NodeState.READY, epoch=1,
                        cpus=1, gpus=0, busy=False, start_deadline=9e9, created_at=0.0, endpoint=node,
                    )
                )  # fmt: skip
        return name

    return add


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """A server that another user runs, and the tokens that it was sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers.get("Authorization", ""))
            self.send_error(404)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", sent
        server.shutdown()


@pytest.fixture
def program(tmp_path: Path) -> tuple[Path, Path]:
    """A program of another user, and the file that it makes."""
    ran = tmp_path / "ran"
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\ntouch {ran}\necho $$ >> {ran}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path, ran


def active(store: Store) -> list[str]:
    """Names of the pools that a reconciler would reconcile."""
    return reconciling._active(reconciling._all_pools(store)) or []


def background(store: Store) -> list[str]:
    """All that shoal does by itself."""
    for name in active(store):
        reconciling._reconcile_one(store, name, reconciling.KeptReadings(store), tidy=True)
    list_pools(store)
    return [*map(str, settle_jobs(store)), *map(str, sweep(store))]


def test_the_program_of_a_planted_pool_is_not_started(planted, program):
    python, ran = program
    name = planted(f"local://planted?python={python}&ray=false")

    did = background(Store())

    assert not ran.exists()
    assert any(f'pool "{name}" is not recorded' in each for each in did)
    assert "is not recorded" in (describe_pool(name).reason or "")
    for ask in (ComputePool(name).up, lambda: ComputePool(name).scale(2)):
        with pytest.raises(PoolElsewhereError, match="is not recorded"):
            ask()
    assert not ran.exists()


def test_another_program_of_a_recorded_pool_is_not_started(planted, program):
    python, ran = program
    bound_host.record(PoolSpec.parse("local://mine?ray=false"))
    planted("local://mine?ray=false&max_nodes=9")
    assert "mine" in active(Store())

    planted(f"local://mine?python={python}&ray=false")

    assert any('pool "mine" in the store has another python' in each for each in background(Store()))
    assert not ran.exists()


def test_the_token_file_of_a_planted_pool_is_not_read(planted, requests, tmp_path):
    url, sent = requests
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    head = {"api": url, "gcs": "127.0.0.1:1", "ray_node_id": "a"}
    name = planted(f"ray://planted?address={url}&token_file={secret}", node=head)

    did = background(Store())
    for only_up in (False, True):
        with pytest.raises(NoPoolError, match="name one with pool_name="):
            which_pool(Store(), only_up=only_up)

    assert sent == []
    assert any(f'pool "{name}" is not recorded' in each for each in did)


def test_a_pool_that_all_hosts_may_use_is_recorded_by_its_name_or_settings(planted, requests):
    url, sent = requests
    for uri in (f"ray://named?address={url}", f"ray://given?address={url}"):
        planted(uri)
    assert active(Store()) == []

    ComputePool("named")
    ComputePool(f"ray://given?address={url}&max_nodes=2")
    ComputePool(f"ray://other?address={url}")

    assert active(Store()) == ["given", "named"]
    background(Store())
    assert sent != []
    planted("ray://named?address=http://127.0.0.1:2")
    ComputePool("named")  # the name alone is no answer to another address
    assert active(Store()) == ["given"]
    ComputePool("ray://named?address=http://127.0.0.1:2")
    assert active(Store()) == ["given", "named"]
    bound_host._file("named").write_text("")  # as a loss of power may leave it
    assert active(Store()) == ["given"]
    ComputePool("named")
    assert active(Store()) == ["given", "named"]


def test_the_token_is_sent_to_the_address_of_the_settings_and_not_of_a_row(planted, requests, tmp_path):
    url, sent = requests
    (tmp_path / "token").write_text("hunter2")
    uri = f"ray://mine?address=http://127.0.0.1:2&token_file={tmp_path / 'token'}"
    planted(uri, node={"api": url, "gcs": "127.0.0.1:1", "ray_node_id": "a"})

    ComputePool(uri)
    background(Store())

    with Store().reading() as session:
        spec = PoolSpec.model_validate(session.get_one(Pool, "mine").spec)
    from shoal.pool.backends.ray.backend import RayBackend

    assert RayBackend().endpoint(spec, {"api": url, "gcs": "127.0.0.1:1"}).api == "http://127.0.0.1:2"
    assert sent == []


def test_a_name_that_leads_to_another_folder_removes_nothing(planted, tmp_path):
    outside = home().parent / f"{home().name}-outside"
    outside.mkdir()
    (outside / "token").write_text("keep")
    name = planted("local://fine", name=f"../../{outside.name}")

    did = background(Store())
    with pytest.raises(StoreError, match="cannot be the name of a file"):
        ComputePool(name).delete(abandon=True)

    assert (outside / "token").read_text() == "keep"
    (outside / "token").unlink()
    outside.rmdir()
    assert any("has a name that no call of shoal has given it" in each for each in did)


def test_a_pool_whose_backend_is_not_installed_does_not_hide_other_pools(planted):
    planted("local://stock")
    planted("ray://retrain?address=http://127.0.0.1:1", node={"api": "http://127.0.0.1:1", "ray_node_id": "a"})
    with Store().transaction() as session:
        pool = session.get_one(Pool, "retrain")
        pool.spec = {**pool.spec, "backend": "quay", "depth": 12}
    reason = missing("quay")
    assert "or the backend of a package that is installed here" in str(reason)
    shown = {pool.name: pool for pool in list_pools()}
    assert set(shown) == {"retrain", "stock"}
    assert (shown["retrain"].reason, shown["retrain"].uri) == (reason, "quay://retrain")
    assert [node.state for node in describe_pool("retrain").active] == ["ready"]
    assert [each for each in sweep(Store()) if each.startswith("retrain")] == [f"retrain: {reason}"]
    with pytest.raises(PoolElsewhereError, match='unknown backend "quay"'):
        ComputePool("retrain").down()
    ComputePool("retrain").delete(abandon=True)
    assert [pool.name for pool in list_pools()] == ["stock"]
