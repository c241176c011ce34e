"""Record at which web addresses Airflow deployments run, for links to their runs and to find copies of a deployment."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select

from shoal.state.schema import AirflowDeployment
from shoal.state.store import Store

_HOUR_S = 3600.0

_USED_WITHIN_S = 48 * _HOUR_S
"""Time within which another address must have been reported to count as that of a copy. A copy with a daily DAG reports
its address more often, and an Airflow that has moved no longer reports its old one."""

_FORGOTTEN_AFTER_S = 30 * 24 * _HOUR_S
"""Time after which an address that no task reports is forgotten, so that there are no links to it any more."""


def record(store: Store, deployment: str, base_url: str, now: float) -> list[str]:
    """Record that a deployment runs at an address at the time `now`. Return the other addresses that it has reported
    recently."""
    others, is_fresh = [], False
    for known in _rows(store, deployment):
        if known.base_url != base_url:
            others += [known.base_url] if known.seen_at > now - _USED_WITHIN_S else []
        else:
            is_fresh = known.seen_at > now - _HOUR_S
    if not is_fresh:
        with store.transaction() as session:
            session.merge(AirflowDeployment(id=deployment, base_url=base_url, seen_at=now))
            session.execute(delete(AirflowDeployment).where(AirflowDeployment.seen_at < now - _FORGOTTEN_AFTER_S))
    return others


def base_urls(store: Store) -> dict[str, str]:
    """Return the address that each deployment has reported last, by the id of the deployment."""
    return {row.id: row.base_url for row in _rows(store)}


def _rows(store: Store, deployment: str | None = None) -> Sequence[AirflowDeployment]:
    query = select(AirflowDeployment).order_by(AirflowDeployment.seen_at)
    return store.scalars(query if deployment is None else query.filter_by(id=deployment))
