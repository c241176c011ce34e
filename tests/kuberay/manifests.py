"""Objects that tests create."""

from __future__ import annotations

from typing import Any


def pod(name: str, image: str, command: str, **spec: Any) -> dict[str, Any]:
    """A pod with one container that runs a command of bash."""
    container = {"name": "main", "image": image, "command": ["/bin/bash", "-c", command], **spec.pop("container", {})}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 2, "restartPolicy": "Never", **spec},
    }


def ray_cluster(name: str, image: str, workers: int, **spec: Any) -> dict[str, Any]:
    """A RayCluster with a head without CPUs and a group `workers` of nodes with one CPU."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name},
        "spec": {
            "rayVersion": "2.60.0",
            "authOptions": {"mode": "token"},
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"} | _PORTS, "template": _template("ray-head", image)},
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": workers,
                    "minReplicas": 0,
                    "maxReplicas": 8,
                    "rayStartParams": {"num-cpus": "1"} | _PORTS,
                    "template": _template("ray-worker", image),
                }
            ],
            **spec,
        },
    }


_PORTS = {"dashboard-agent-grpc-port": "52366", "runtime-env-agent-port": "52367"}
"""A raylet waits for 15 s for agents that choose their ports, and then aborts: too short on a busy machine."""


def _template(name: str, image: str) -> dict[str, Any]:
    # The requests are what is scheduled, so that two nodes have room; a limit of CPU would only say how many Ray sees.
    resources = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "3Gi"}}
    container = {"name": name, "image": image, "resources": resources}
    return {"spec": {"containers": [container], "terminationGracePeriodSeconds": 2}}
