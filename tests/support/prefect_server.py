"""Fixtures: a Prefect server, and what is logged there. Prefect is imported where it is used: that takes seconds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """One Prefect server for the session, with files of its own."""
    from prefect.settings import PREFECT_HOME, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    folder = Path(tempfile.mkdtemp(prefix="shoal-test-prefect-"))
    storage = folder / "storage"
    with (
        pytest.MonkeyPatch.context() as patch,  # for the processes that tests start
        temporary_settings({PREFECT_HOME: folder, PREFECT_LOCAL_STORAGE_PATH: storage}),
        prefect_test_harness(server_startup_timeout=240),
    ):
        patch.setenv("PREFECT_HOME", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def logged(server):
    """Waits until a text is in the log of any run: logs reach the server in batches."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import LogSort

    def wait_for(text: str) -> str:
        def found() -> str | None:
            with get_client(sync_client=True) as client:
                newest_first = client.read_logs(sort=LogSort.TIMESTAMP_DESC)  # 200 at most
            return next((entry.message for entry in newest_first if text in entry.message), None)

        return wait_until(found, f'"{text}" in a log')

    return wait_for
