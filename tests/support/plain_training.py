"""The retraining with no engine: what a DAG and a flow have to come to, too."""

from __future__ import annotations

from shoal import ComputePool
from shoal.examples.flights import retraining_spec
from shoal.jobs import submit


def plain_digest(pool: ComputePool, *, month: int, rounds: int) -> str:
    """Digest of the model that three nodes of a pool make of the same spec."""
    spec = retraining_spec(month, n_estimators=rounds).model_copy(update={"register_as": None})
    run_config = spec.run_config.model_copy(update={"pool_name": pool.name})
    with pool.lease(3):
        return submit(spec.model_copy(update={"run_config": run_config})).wait().model_digest
