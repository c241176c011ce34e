"""The parts of the node agent that need no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kuberay.agent.names import Names, rewrite
from tests.kuberay.agent.quantities import memory_limit, resource_value
from tests.kuberay.agent.variables import expand, field

POD: dict[str, Any] = {"metadata": {"name": "me", "namespace": "ml", "labels": {"ray.io/cluster": "ray"}}, "spec": {}}


def endpoints(namespace: str, service: str, *addresses: str, ready: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": f"{service}-1", "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
        "endpoints": [{"addresses": [each], "conditions": {"ready": ready}} for each in addresses],
    }


def test_names_of_services_lead_to_their_ready_pods():
    names = Names()
    names.changed("LIST", [endpoints("ml", "head", "198.18.0.9"), endpoints("ml", "slow", "198.18.0.8", ready=False)])
    names.changed("ADDED", endpoints("other", "head", "198.18.0.7"))

    lines = {line.split("\t")[0]: line.split("\t")[1:] for line in names.hosts(POD, "198.18.0.10").splitlines()}

    assert lines["198.18.0.9"] == ["head.ml.svc.cluster.local", "head.ml.svc", "head.ml", "head"]
    assert "head" not in lines["198.18.0.7"]
    assert "198.18.0.8" not in lines
    assert lines["198.18.0.10"] == ["me"]

    names.changed("DELETED", endpoints("ml", "head"))
    assert "198.18.0.9" not in names.hosts(POD, "198.18.0.10")


def test_a_hosts_file_is_rewritten_in_place(tmp_path: Path):
    file = tmp_path / "hosts"
    rewrite(file, "a long line\n")
    before = file.stat().st_ino

    rewrite(file, "short\n")

    assert (file.read_text(), file.stat().st_ino) == ("short\n", before)


@pytest.mark.parametrize(
    ("container", "reference", "value"),
    [
        ({"limits": {"cpu": "1500m"}}, {"resource": "limits.cpu"}, "2"),
        ({"limits": {"memory": "1Gi"}}, {"resource": "requests.memory", "divisor": "1Mi"}, "1024"),
    ],
)
def test_fields_of_resources_are_rounded_up_in_units_of_the_divisor(container: Any, reference: Any, value: str):
    assert resource_value({"resources": container}, reference) == value


def test_units_of_memory():
    limits = [memory_limit({"resources": {"limits": {"memory": limit}}}) for limit in ("100Mi", "1G", "512")]
    assert limits == [100 * 2**20, 10**9, 512]
    assert memory_limit({}) is None


def test_references_to_variables_are_replaced():
    assert (
        expand("$(HOST):$(PORT) $$(HOST) $(UNKNOWN)", {"HOST": "head", "PORT": "6379"})
        == "head:6379 $(HOST) $(UNKNOWN)"
    )


def test_fields_of_a_pod():
    assert field(POD, "metadata.labels['ray.io/cluster']") == "ray"
    assert field(POD | {"status": {"podIPs": [{"ip": "1.2.3.4"}]}}, "status.podIPs") == "1.2.3.4"
    assert field(POD, "status.podIP") == ""
