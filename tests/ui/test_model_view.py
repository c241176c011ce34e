"""Models as the page shows them: from the store, and from a real MLflow server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from examples.ports import free_port
from shoal.errors import ModelNotFoundError
from shoal.ui.model_view import Models
from tests.support.model_registry import Shelf, add_promotion
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def promotions(store):
    for version, value, ago in (("1", 3.0, 200), ("3", 2.0, 100)):
        at = time.time() - ago
        add_promotion("http://mlflow", "delays", version, value=value, created_at=at, confirmed_at=at)


def test_champions_come_from_the_store_if_mlflow_has_no_web_address(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////somewhere/mlflow.db")
    model = Models(store).described("delays")

    assert (model.champion, model.champion_value, model.metric, model.versions) == ("3", 2.0, "rmse", ())
    assert model.note is not None and "the address of an MLflow server" in model.note
    assert model.plot is not None and model.plot["values"] == [3.0, 2.0]
    assert model.link is None
    with pytest.raises(ModelNotFoundError, match="absent"):
        Models(store).described("absent")


def test_a_server_that_does_not_answer_is_named_without_its_password_and_asked_once(store, monkeypatch):
    with closing(socket.socket()) as listener:  # a port where nobody listens
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://anna:secret@127.0.0.1:{listener.getsockname()[1]}")
        asked = []
        monkeypatch.setattr(httpx.Client, "get", lambda *_, **__: (asked.append(1), httpx.get("http://127.0.0.1:1"))[1])
        models = Models(store)
        note = models.listed()["note"]
        models.described("delays")
    assert "gives no answer" in note and "secret" not in note
    assert len(asked) == 1


@pytest.mark.long
@pytest.mark.server
def test_versions_come_from_a_real_server(store, monkeypatch, mlflow_database: Path, tmp_path: Path):
    """A long test, because MLflow's server takes ten seconds to start."""
    uri = f"sqlite:///{mlflow_database}"
    shelf = Shelf(uri, str(tmp_path))
    told = {"shoal__reason": "better", "shoal__decision": "better than 3", "shoal__alias": "champion"}
    shelf.add("delays", holdout__rmse=3.0, holdout__rmse__digest="d", **told)
    shelf.add("delays", holdout__rmse=4.0, holdout__rmse__digest="d", shoal__reason="champion_not_beaten")
    shelf.add("delays", alias="champion", holdout__rmse=2.0, holdout__rmse__digest="d", **told)
    shelf.add("of-a-person", key=None)
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--port", str(port), "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )
    try:
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{address}/health").status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(answers, "MLflow's server", 120, every=0.5)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        listed = Models(store).listed()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)

    assert listed["note"] is None
    [model] = listed["all"]
    assert (model.name, model.champion, model.champion_value, model.metric) == ("delays", "3", 2.0, "rmse")
    assert [(each.version, each.value, each.promoted) for each in model.versions] == [
        ("3", 2.0, True),
        ("2", 4.0, False),
        ("1", 3.0, True),
    ]
    assert model.plot["promoted"] == [True, False, True]
    assert model.link.address == f"{address}/#/models/delays"
