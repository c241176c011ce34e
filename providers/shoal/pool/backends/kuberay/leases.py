"""Kubernetes Leases of RayClusters that shoal has created: pure, without requests.

The name of a Lease contains the identity of one start of a pool. So no request of another pool, or of an earlier start
of this pool, reaches it. Whether it has expired is judged by the clock of the Kubernetes API alone, which records the
time of each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from shoal.pool.backends.kuberay.resources import MADE
from shoal.pool.timeouts import RAY_CLUSTER_LEASE


def name_of(ray_cluster: str, life: str = "") -> str:
    """Return the name of the Lease of a RayCluster in one life of its pool (see `PoolRef.life`)."""
    return f"shoal-{ray_cluster}-{sha256(life.encode()).hexdigest()[:10]}"


def made(ray_cluster: str, life: str) -> dict[str, Any]:
    """Return a new Lease."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name_of(ray_cluster, life), "labels": dict(MADE)},
        "spec": {"holderIdentity": life, "leaseDurationSeconds": int(RAY_CLUSTER_LEASE), "renewTime": now()},
    }


def now() -> str:
    """Return the present time as Leases have it. Each renewal changes it, and nothing else depends on it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def has_expired(lease: Mapping[str, Any], at: datetime) -> bool:
    """Return whether nobody has changed a Lease for its duration. `at` is the present time of the Kubernetes API."""
    meta = lease["metadata"]
    changes = [entry["time"] for entry in meta.get("managedFields") or () if "time" in entry]
    changed = datetime.fromisoformat(max([meta["creationTimestamp"], *changes]))
    return at - changed > timedelta(seconds=lease["spec"].get("leaseDurationSeconds") or RAY_CLUSTER_LEASE)
