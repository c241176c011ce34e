"""Pytest plugin with fixtures that check DAG files. Pytest finds the plugin through the entry point ``pytest11``.

Pytest loads the plugin in every session of an environment with shoal. So the plugin imports neither Airflow nor shoal's
operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shoal.airflow.testing.check import DagReport, check_dags


@pytest.fixture(scope="session")
def dag_report() -> Callable[..., DagReport]:
    """Return a function that checks DAG files and returns the report (see `shoal.airflow.testing.check_dags`)."""

    return check_dags


@pytest.fixture(scope="session")
def assert_dags(dag_report: Callable[..., DagReport]) -> Callable[..., None]:
    """Return a function that checks DAG files, and fails the test with the list of their problems.

    The function has the arguments of `shoal.airflow.testing.check_dags`.
    """

    return partial(fail_on_findings, dag_report)


def fail_on_findings(check: Callable[..., DagReport], *paths: Any, **options: Any) -> None:
    """Check DAG files, and fail the test if there are problems."""
    report = check(*paths, **options)
    if report.findings:
        pytest.fail(str(report), pytrace=False)
