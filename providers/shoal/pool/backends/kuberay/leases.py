"""Kubernetes Leases of RayClusters that shoal has created: pure, without requests."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from shoal.pool.backends.kuberay.resources import MADE
from shoal.pool.timeouts import RAY_CLUSTER_LEASE

_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


def name_of(ray_cluster: str) -> str:
    """Return the name of the Lease of a RayCluster."""
    return f"shoal-{ray_cluster}"


def made(ray_cluster: str) -> dict[str, Any]:
    """Return a new Lease."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name_of(ray_cluster), "labels": dict(MADE)},
        "spec": {"holderIdentity": "shoal", "leaseDurationSeconds": int(RAY_CLUSTER_LEASE), "renewTime": now()},
    }


def now() -> str:
    """Return the present time as Leases have it."""
    return datetime.now(UTC).strftime(_TIME)


def is_made(lease: Mapping[str, Any]) -> bool:
    """Return whether shoal has created a Lease."""
    return MADE.items() <= (lease["metadata"].get("labels") or {}).items()


def has_expired(lease: Mapping[str, Any], at: datetime) -> bool:
    """Return whether nobody has renewed a Lease for its duration."""
    spec = lease["spec"]
    renewed = datetime.fromisoformat(spec["renewTime"])
    return at - renewed > timedelta(seconds=spec["leaseDurationSeconds"])
