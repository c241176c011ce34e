"""End the RayClusters whose shoal is gone for good: ``python -m shoal.pool.backends.kuberay.reaper NAMESPACE``.

The CronJob in docs/kubernetes.md runs this program. It needs no store, because the store may be gone, too: it deletes
the Leases that nobody has renewed, and Kubernetes deletes the RayClusters that they own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shoal.errors import ShoalError
from shoal.pool.backends.kuberay import scaling
from shoal.pool.backends.kuberay.client import KubeClient
from shoal.pool.spec import PoolSpec


def reap(client: KubeClient) -> list[str]:
    """Delete the Leases of RayClusters that nobody has renewed for their duration, and return their names."""
    found, now = client.leases()
    expired = [lease for lease in found if scaling.has_expired(lease, now)]
    return [lease["metadata"]["name"] for lease in expired if client.delete_lease(lease)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(description="End the RayClusters whose shoal is gone for good.")
    parser.add_argument("namespace", help="Kubernetes namespace of the RayClusters")
    parser.add_argument("--kubeconfig", help="kubeconfig file; default: the pod's service account, or $KUBECONFIG")
    given = parser.parse_args(argv)
    try:
        spec = PoolSpec(name="reaper", backend="kuberay", namespace=given.namespace, kubeconfig=given.kubeconfig)
        ended = reap(KubeClient(spec))
    except ShoalError as error:
        print(error, file=sys.stderr)
        return 1
    for name in ended:
        print(f"deleted Lease {given.namespace}/{name}, which nobody has renewed; its RayCluster ends")
    return 0


if __name__ == "__main__":
    sys.exit(main())
