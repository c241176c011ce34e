from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from shoal.state import Store
from shoal.ui.access import TokenAccess
from shoal.ui.app import create_app
from tests.support.browser import TOKEN, browser, opened  # noqa: F401


@pytest.fixture
def store(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Store()


@pytest.fixture
def stranger(store: Store) -> Iterator[TestClient]:
    """A client without the token."""
    app = create_app(access=TokenAccess(TOKEN, "cli:tester@host"))
    with TestClient(app, base_url="http://127.0.0.1:8000", follow_redirects=False) as client:
        yield client
    app.state.reader.close()


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    """A client that has opened the link with the token."""
    answer = stranger.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    return stranger
