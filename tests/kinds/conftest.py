from __future__ import annotations

from tests.support.job_store import another_head, head, mlflow_uri, own_mlflow, spec, store

__all__ = ["another_head", "head", "mlflow_uri", "own_mlflow", "spec", "store"]
