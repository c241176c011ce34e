"""Predict the rows of the last complete month whenever a new version of the flight delay model becomes the champion.

``python flows/score_on_promotion_flow.py`` serves the flow with a trigger: the server starts a run when a training has
sent the event ``shoal.model.promoted`` about the model. A run predicts with the model version in the event, even if
another version is the champion by now. So a repeated run writes the same predictions to the same folder.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.events import DeploymentEventTrigger
from prefect.runtime import flow_run

from shoal.data import DataConnector
from shoal.examples.flights import POOL, months_before, recent_files
from shoal.prefect import batch_predict, clean_up_run, pool_lease
from shoal.state.home import subfolder

MODEL = "recent-flight-delays"
"""Name of the model that the scheduled retraining registers."""

NODES = 2

ON_PROMOTION = DeploymentEventTrigger(
    name=f"shoal: score when {MODEL} was promoted",
    expect={"shoal.model.promoted"},
    match={"prefect.resource.id": f"shoal.model.{MODEL}"},
    parameters={"version": "{{ event.payload.version }}"},
)


@flow(
    name="score-on-promotion",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def score(version: str, pool: str = POOL) -> dict[str, Any]:
    """Lease two nodes, predict the rows of the last complete month before the run, and release the nodes.

    Args:
        version: Version of the model to predict with.
        pool: URI of the pool, or name of a pool that is up.

    Returns:
        The result of the job.
    """
    [month] = months_before(flow_run.scheduled_start_time, 1)
    output = subfolder("examples") / "predictions" / MODEL / f"version-{version}" / month
    with pool_lease(NODES, pool_name=pool) as leased:
        return batch_predict(
            f"models:/{MODEL}/{version}",
            DataConnector.from_parquet(recent_files([month])),
            str(output),
            pool_name=leased.name,
        )


if __name__ == "__main__":
    score.serve(name="on-promotion", triggers=[ON_PROMOTION], pause_on_shutdown=False)
