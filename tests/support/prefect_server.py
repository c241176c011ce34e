"""Fixtures: a Prefect server, and what is logged there. Prefect is imported where it is used: that takes seconds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


@pytest.fixture(scope="session")
def server() -> Iterator[dict[str, str]]:
    """One Prefect server for the session, with files of its own, to which this process is connected.

    It evaluates automations, which that of Prefect's own test harness does not. Gives the environment of its clients.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_LOCAL_STORAGE_PATH, temporary_settings

    from examples import prefect_run

    folder = Path(tempfile.mkdtemp(prefix="shoal-test-prefect-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(folder))  # for the processes that tests start
        with prefect_run._server(folder) as environment:
            settings = {
                PREFECT_HOME: folder,
                PREFECT_LOCAL_STORAGE_PATH: folder / "storage",
                PREFECT_API_URL: environment["PREFECT_API_URL"],
            }
            with temporary_settings(settings):
                yield environment
                # What is still to be sent is sent while the server is there.
                APILogWorker.drain_all()
                EventsWorker.drain_all()
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
