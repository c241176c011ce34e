from __future__ import annotations

import re

import pytest

from shoal.errors import InvalidArgumentError
from shoal.pool.spec import PoolSpec


def test_a_uri_and_its_spec_say_the_same():
    spec = PoolSpec.parse("local://retrain?max_nodes=6&cpus_per_node=2&idle_timeout=none")
    assert (spec.name, spec.max_nodes, spec.cpus_per_node, spec.idle_timeout) == ("retrain", 6, 2, None)
    assert PoolSpec.parse(spec.uri) == spec
    assert PoolSpec.parse(spec.model_dump()) == spec


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("retrain", "not a pool URI"),
        ("local://", "not a valid pool name"),
        ("local://Retrain_1", "not a valid pool name"),
        ("local://-x", "not a valid pool name"),
        ("local://" + "x" * 41, "not a valid pool name"),
        ("local://x?max_node=3", "did you mean max_nodes"),
        ("local://x?paint=red", 'unknown option "paint"; allowed options: name, backend, min_nodes'),
        ("local://x?max_nodes=0", "max_nodes"),
        ("local://x?max_nodes=two", "max_nodes"),
        ("local://x?min_nodes=5&max_nodes=3", "min_nodes=5 is above max_nodes=3"),
        ("local://x?max_nodes=3&max_nodes=4", "twice"),
        ("local://x/y", "without user, port"),
        ("local://x?idle_timeout=-1", "idle_timeout"),
        ("slurm://x", 'unknown backend "slurm"'),
    ],
)
def test_a_wrong_uri_says_what_is_wrong(uri, said):
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        PoolSpec.parse(uri)
    assert "55word" not in str(caught.value)


def test_a_foreign_cluster_has_an_address_and_never_a_token():
    uri = "ray://lab?max_nodes=8&address=http://10.0.0.5:8265&gcs=10.0.0.5:6379&token_file=/run/a%20b"
    spec = PoolSpec.parse(uri)
    assert (spec.address, spec.gcs, spec.token_file) == ("http://10.0.0.5:8265", "10.0.0.5:6379", "/run/a b")
    assert PoolSpec.parse(spec.uri) == spec


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("ray://lab", "needs the URL of the cluster's Job API"),
        ("ray://10.0.0.5:8265", "without user, port"),
        ("ray://lab?address=10.0.0.5:8265", "needs the URL"),
        ("ray://lab?address=http://me:pa55word@10.0.0.5:8265", "must not contain credentials"),
        ("ray://lab?address=http://10.0.0.5:8265&token=x", "did you mean token_file"),
        ("ray://lab?address=http://me:pa%2F55word@10.0.0.5:8265", "must not contain credentials"),
        ("ray://lab?address=https://pa55word@10.0.0.5:8265", "must not contain credentials"),
        ("ray://lab?address=http://[::1", "needs the URL"),
        ("ray://lab?address=http://10.0.0.5:notaport", "needs the URL"),
        ("http://[::1", "not a pool URI"),
        (
            "local://x?address=http://10.0.0.5:8265",
            "options that are allowed only for ray:// pools: address",
        ),
    ],
)
def test_what_is_wrong_with_a_foreign_one_is_said(uri, said):
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        PoolSpec.parse(uri)
    assert "55word" not in str(caught.value)


def test_a_pool_on_kubernetes_has_its_namespace_in_the_uri():
    spec = PoolSpec.parse("kuberay://ml/retrain?max_nodes=8&group=big")
    assert (spec.namespace, spec.name, spec.ray_cluster) == ("ml", "retrain", "retrain")
    assert spec.uri == "kuberay://ml/retrain?max_nodes=8&group=big"
    assert PoolSpec.parse(spec.uri) == spec
    assert (
        PoolSpec.parse({"backend": "kuberay", "namespace": "ml", "name": "retrain", "max_nodes": 8, "group": "big"})
        == spec
    )
    assert PoolSpec.parse("kuberay://ml/x?cluster=y").ray_cluster == "y"
    assert "namespace" not in PoolSpec.parse("local://x").model_dump()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("kuberay://ml", "has the form kuberay://NAMESPACE/NAME"),
        ("kuberay://ml/a/b", "has the form kuberay://NAMESPACE/NAME"),
        ("kuberay://ml/x?namespace=y", "contains the option namespace twice"),
        ("kuberay://Ml_/x", "namespace='Ml_' is no name of Kubernetes"),
        ("kuberay://ml/x?group=Big", "group='Big' is no name of Kubernetes"),
        ("kuberay://ml/x?address=http://h", "allowed only for ray:// pools: address"),
        ("kuberay://ml/x?api=h", "it has to be a URL"),
        ("kuberay://ml/x?api=http://h:8265/?a=b", "must end with the port or path"),
        ("kuberay://ml/x?api=http://u:secret@h", "must not contain credentials; remove them"),
        ("kuberay://ml/x?ca_file=/ca.pem", "ca_file is allowed only with an https:// address"),
        ("kuberay://ml/x?ray=false", "that are allowed only for local:// pools: ray;"),
        ("kuberay://ml/x?gpus_per_node=-1", "gpus_per_node=-1 is allowed only for local:// pools"),
        ("ray://x?address=http://h&group=big", "allowed only for kuberay:// pools: group"),
        ("local://x?context=prod", "allowed only for kuberay:// pools: context"),
    ],
)
def test_what_is_wrong_with_a_pool_on_kubernetes_is_said(uri, said):
    with pytest.raises(InvalidArgumentError, match=re.escape(said)) as caught:
        PoolSpec.parse(uri)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("given", ["inf", "INF", float("inf"), "none", None])
def test_an_infinite_idle_timeout_means_never(given):
    spec = PoolSpec.parse({"name": "x", "idle_timeout": given})
    assert spec.idle_timeout is None
    assert PoolSpec.parse(spec.uri) == spec


@pytest.mark.parametrize("given", [True, "true", "1"])
def test_rays_dashboard_is_an_option_of_local_pools(given):
    spec = PoolSpec.parse({"name": "x", "ray_dashboard": given})
    assert spec.uri == "local://x?ray_dashboard=true"
    assert PoolSpec.parse(spec.uri) == spec
    with pytest.raises(InvalidArgumentError, match="that are allowed only for local:// pools: ray_dashboard;"):
        PoolSpec.parse({"name": "x", "backend": "ray", "address": "http://h", "ray_dashboard": given})


def test_libraries_are_names_of_an_option_of_local_pools():
    spec = PoolSpec.parse("local://x?libraries=xgboost,mlflow")
    assert spec.library_names() == ["xgboost", "mlflow"]
    assert spec.uri == "local://x?libraries=xgboost,mlflow"
    assert PoolSpec.parse("local://x").library_names() == []
    with pytest.raises(InvalidArgumentError, match="libraries=xgboost,numpy: numpy is not one of xgboost, lightgbm"):
        PoolSpec.parse("local://x?libraries=xgboost,numpy")
    assert PoolSpec.parse("local://x?ray=false&max_nodes=1&libraries=torch").library_names() == ["torch"]
    with pytest.raises(InvalidArgumentError, match="libraries=torch is allowed only with ray=false"):
        PoolSpec.parse("local://x?libraries=torch")
    with pytest.raises(InvalidArgumentError, match="that are allowed only for local:// pools: libraries;"):
        PoolSpec.parse("ray://x?address=http://h&libraries=xgboost")


@pytest.mark.parametrize("option", ["max_nodes", "idle_timeout"])
def test_a_truth_value_is_no_number(option):
    with pytest.raises(
        InvalidArgumentError, match=f"{option}=True: true and false are not allowed as values of this option"
    ):
        PoolSpec.parse({"name": "x", option: True})


@pytest.mark.parametrize("uri", ["local://[::1", "ray://x?address=http://[::1", "ray://x?address=http://h:notaport"])
def test_what_is_no_url_is_refused(uri):
    with pytest.raises(InvalidArgumentError):
        PoolSpec.parse(uri)
