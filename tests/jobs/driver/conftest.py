from __future__ import annotations

from tests.jobs.test_driver import environment, spec

__all__ = ["environment", "spec"]
