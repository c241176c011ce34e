from __future__ import annotations

from tests.jobs.driver.test_main import environment, spec

__all__ = ["environment", "spec"]
