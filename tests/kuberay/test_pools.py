"""Pools on a real control plane: the guarantees of every backend, with the smallest Role, and what users read.

Ray is the stand-in `light_ray.py`, whose nodes start fast; the operator, the scheduler and all requests are real.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import reconcile
from shoal.state import Store
from tests.kuberay.accounts import smallest_role
from tests.kuberay.pools import Kubernetes
from tests.pool.backends.test_conformance import GUARANTEES
from tests.support.waiting import wait_until

client = pytest.importorskip("kubernetes.client")

RAY = ("ray.io", "v1")


def reason(pool: ComputePool) -> str:
    """Why the first node that is not ready waits, as users read it after one look."""
    reconcile(Store(), pool.name)
    return pool.describe().reason or ""


def wait_for_reason(pool: ComputePool, said: str) -> str:
    return wait_until(lambda: said in (found := reason(pool)) and found, f"the reason {said!r}", seconds=60, every=0.2)


def wait_for_nodes(pool: ComputePool, number: int) -> None:
    def there() -> bool:
        reconcile(Store(), pool.name)
        return len(pool.get_nodes()) == number

    wait_until(there, f"{number} nodes", seconds=120, every=0.2)


def test_a_real_cluster_keeps_every_guarantee_with_the_smallest_role(kube: Kubernetes):
    pool = ComputePool(kube.uri).up()
    for test in GUARANTEES:
        pool.scale(1)
        test(kube, pool)


def test_the_role_gives_no_other_right(kube: Kubernetes):
    from kubernetes.config import new_client_from_config

    with new_client_from_config(str(kube.kubeconfig)) as api:
        asked = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": kube.namespace},
        }
        rules = client.AuthorizationV1Api(api).create_self_subject_rules_review(asked).status.resource_rules

    def of(groups: list[str], resources: list[str], verbs: list[str]) -> set[tuple[str, str, str]]:
        return {(group, resource, verb) for group in groups for resource in resources for verb in verbs}

    given = set().union(*(of(rule.api_groups, rule.resources, rule.verbs) for rule in rules))
    # Every account may ask what it may do.
    own = {right for right in given if right[0].endswith(".k8s.io")}
    asked_for = smallest_role(kube.namespace, kube.name)["rules"]
    assert given - own == set().union(*(of(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in asked_for))


def test_twenty_scalers_at_once_end_at_one_size(kube: Kubernetes, pool: ComputePool):
    def scale(number: int) -> bool:
        try:
            return ComputePool(kube.uri).scale(1 + number % 4)
        except ScaleError:  # a newer operation has set another size
            return False

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(scale, range(20)))
    size = pool.describe().target
    reconcile(Store(), pool.name)
    wait_until(lambda: len(kube.pods()) == size - 1, f"{size - 1} workers", seconds=60)
    assert kube.replicas() == size - 1


def test_an_operator_that_does_not_run_is_named_and_its_restart_is_enough(kube: Kubernetes, pool: ComputePool):
    kube.plane.services["ray-operator"].stop()
    try:
        pool.scale(2, is_async=True)
        wait_for_reason(pool, "does not act on RayCluster")
    finally:
        kube.plane.services["ray-operator"].start()
    wait_for_nodes(pool, 2)
