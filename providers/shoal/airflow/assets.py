"""Airflow assets of registered models. A promotion of a model updates the model's asset, which can trigger other
DAGs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias

from shoal.errors import InvalidArgumentError, shown

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import JobResult, PromotionResult

CHAMPION = "champion"
"""Default alias that a promotion moves to the new model version. The class `Register` has the same default, but DAG
files do not load that class."""

PROMOTIONS = AssetAlias("shoal-promotions")
"""Asset alias that is an outlet of every training task. A task whose model was promoted adds an event of the model's
asset to this alias. If a task adds no event, Airflow records none."""


def model_asset(model: str, alias: str = CHAMPION) -> Asset:
    """Return the asset of a registered model, ``Asset("shoal://models/MODEL")``. Each promotion updates it.

    For an alias other than ``champion``, the asset is ``Asset("shoal://models/MODEL@ALIAS")``. Characters of the names
    that a URI cannot contain are percent-encoded.

    :param model: Name of the model in MLflow's registry.
    :param alias: Alias in MLflow's registry that a promotion moves.
    """
    if not isinstance(model, str) or not model or any(mark in model for mark in "/:"):
        raise InvalidArgumentError(
            f'{shown(model)} is not a legal name for a registered model: use 1 to 250 characters without "/" and ":"'
        )
    return Asset(f"shoal://models/{quote(model, safe='')}" + ("" if alias == CHAMPION else f"@{alias}"))


def promotion_of(context: Context, model: str, alias: str = CHAMPION) -> dict[str, Any] | None:
    """Return the model promotion that triggered this DAG run; None if the run was triggered in another way.

    If several promotions have triggered the run together, the newest one is returned. A run that is cleared and runs
    again gets the same promotion, even if the model was promoted again since then.

    :param context: Airflow's context of a task of the run.
    :param model: Name of the model in MLflow's registry.
    :param alias: Alias that the promotion has moved.
    :returns: A dict with ``model``, ``alias``, ``version``, ``model_uri`` (``models:/MODEL/VERSION``), ``metric``,
        ``metrics``, ``decision``, ``reason``, ``job_id`` and ``previous_version`` (None if there was no champion).
    """
    try:
        events = context["triggering_asset_events"][model_asset(model, alias)]
    # A user, a schedule or another asset has triggered the DAG run, and not a promotion of this model.
    except KeyError:
        return None
    newest = max(events, key=lambda event: event.timestamp)
    return dict(newest.extra)


def add_promotion(
    context: Context, model: str, alias: str, metric: str | None, result: JobResult | PromotionResult
) -> None:
    """Add an asset event to a task that has promoted a model. Airflow records the event when the task succeeds.

    :param context: Airflow's context of the task.
    :param model: Name of the registered model.
    :param alias: Alias that the promotion has moved.
    :param metric: Name of the metric that has decided.
    :param result: Result of the job, or of the promotion.
    """
    # Airflow stores the event as JSON, which has no NaN, so `to_dict` converts NaN to text.
    plain = result.to_dict()
    decision, champion = plain["decision"] or {}, plain["champion"] or {}
    context["outlet_events"][PROMOTIONS].add(
        model_asset(model, alias),
        extra={
            "model": model,
            "alias": alias,
            "version": result.model_version,
            "model_uri": f"models:/{model}/{result.model_version}",
            "metric": metric,
            "metrics": plain["metrics"],
            "decision": decision.get("sentence"),
            "reason": decision.get("reason"),
            "job_id": result.job_id,
            "previous_version": champion.get("version"),
        },
    )
