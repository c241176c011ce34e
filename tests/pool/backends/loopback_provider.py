"""A "cloud" on this machine for Ray's autoscaler: its nodes are raylets on loopback, children of Ray's monitor.

Ray's own `AutoscalingCluster` runs `ray stop`, which ends every Ray process of the host: so the tests start the head
themselves, and give its monitor this.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

from ray._private.parameter import RayParams
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


def _on_loopback(**params: Any) -> RayParams:
    return RayParams(**{**params, "node_ip_address": "127.0.0.1", "include_log_monitor": False})


class LoopbackProvider(FakeMultiNodeProvider):
    """Ray's fake provider, made to join the head that the monitor was started for."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        gcs = next(a.removeprefix("--gcs-address=") for a in sys.argv if a.startswith("--gcs-address="))
        super().__init__({**provider_config, "gcs_address": gcs}, cluster_name)

    def _create_node_with_resources_and_labels(self, *args: Any, **kwargs: Any) -> None:
        with patch("ray._private.parameter.RayParams", _on_loopback):
            super()._create_node_with_resources_and_labels(*args, **kwargs)
