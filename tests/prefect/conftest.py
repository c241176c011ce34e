"""Fixtures of the tests of the Prefect collection."""

from __future__ import annotations

import pytest

from tests.support import waiting_jobs


@pytest.fixture
def jobs(server, tiny, monkeypatch):
    """Trainings are jobs that wait until they are cancelled."""
    monkeypatch.setattr("shoal.prefect.job_task.submit", waiting_jobs.submit)
    monkeypatch.setattr("shoal.jobs.cleanup.settle_jobs", lambda _: [])  # it would start them
