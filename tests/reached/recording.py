"""A plugin of pytest: whatever runs from here on, in any process, counts for this test file."""

from __future__ import annotations

from collections.abc import Iterator

import coverage
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if current := coverage.Coverage.current():
        current.switch_context(item.nodeid.partition("::")[0])
    return (yield)
