"""The Dockerfile and the compose file, read: versions, users, limits, ports and secrets."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from sqlalchemy.engine import make_url

from shoal.pool.spec import PoolSpec
from tests.support import ROOT
from tests.support.dockerfile import DOCKERFILE, installs, stages

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def secrets_of(service: dict) -> set[str]:
    """The names under which a service finds its secrets in /run/secrets."""
    return {each if isinstance(each, str) else each["target"] for each in service.get("secrets", [])}


def test_packages_of_the_images_have_the_versions_of_the_tests():
    pins = dict(line.split("==") for line in (ROOT / "requirements" / "dev.txt").read_text().split())
    pins["xgboost"] = pins["xgboost-cpu"]
    [torch] = [each for each in PROJECT["dependency-groups"]["dev"] if str(each).startswith("torch==")]
    pins["torch"] = torch.partition("==")[2]
    given = [package for _, _, *packages in installs(DOCKERFILE) for package in packages if "==" in package]
    named = [Requirement(package) for package in given]
    versions = {(each.name, one.version) for each in named for one in each.specifier if one.operator == "=="}

    assert {name for name, _ in versions} == {"torch", "xgboost"}
    assert {(name, version.removesuffix("+cpu")) for name, version in versions} == {
        (name, pins[name]) for name, _ in versions
    }


def test_images_of_orchestrators_contain_neither_ray_nor_libraries_that_train():
    extras = PROJECT["project"]["optional-dependencies"]
    for environment in ("orchestrator-env", "prefect-env"):
        [(_, names, *packages)] = installs(stages()[environment])
        needed = [*packages, *(each for name in names.split(",") for each in extras[name])]
        assert not re.search(r"ray|xgboost|lightgbm|torch|mlflow|shoal\[", " ".join(needed))


@pytest.mark.parametrize("target", ["orchestrator", "node", "node-gpu", "prefect", "s3", "postgresql"])
def test_an_image_runs_as_a_user_without_rights(target):
    assert re.findall(r"^USER (\S+)$", stages()[target], flags=re.MULTILINE) in (["shoal"], ["postgres"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_health_check_limits_and_no_rights(name):
    service = SERVICES[name]

    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "cpus", "pids_limit"} <= set(service)
    if service["restart"] == "no":  # a task that ends
        assert service["healthcheck"] == {"disable": True}
    else:
        assert set(service["healthcheck"]) == {"test", "interval", "timeout", "retries", "start_period"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert service["image"].removeprefix("localhost/shoal-").removesuffix(":${TAG:-latest}") in stages()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gets_secrets_only_as_files(name):
    service = SERVICES[name]
    mounted = secrets_of(service)
    environment = service.get("environment", {})
    text = f"{environment} {service.get('command')}"

    # The API server has the environment of all Airflow's services, but not the secrets of tasks.
    of_tasks = {"ray_token", "s3_credentials"} if name == "airflow-api-server" else set()
    assert set(re.findall(r"/run/secrets/(\w+)", text)) <= mounted | of_tasks
    assert not of_tasks & mounted
    for variable, value in environment.items():
        if re.search("PASSWORD|TOKEN|SECRET|KEY|CREDENTIAL", variable):
            assert "/run/secrets/" in value, variable
        if "://" in value and "?" not in value:
            assert "@" not in value or make_url(value).password is None


def test_the_pool_of_the_stack_has_the_nodes_of_the_stack():
    pool = PoolSpec.parse(SERVICES["airflow-scheduler"]["environment"]["AIRFLOW_VAR_SHOAL_RETRAIN_POOL"])

    assert pool.max_nodes == 1 + SERVICES["ray-worker"]["deploy"]["replicas"]
    [shared] = pool.shared()
    for name in ("airflow-scheduler", "ray-head", "ray-worker"):
        assert f"examples:{shared}" in {each.removesuffix(":ro") for each in SERVICES[name]["volumes"]}


def test_secrets_are_written_once_and_a_node_gets_only_the_role_of_nodes(stack, tmp_path):
    folder = tmp_path / "secrets"

    stack.write_secrets(folder)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    stack.write_secrets(folder)

    assert set(written) == set(COMPOSE["secrets"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == written
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [line.split(":")[:4] for line in written["pgpass_node"].splitlines()] == [
        ["postgresql", "5432", "shoal", "shoal_node"]
    ]


def test_an_index_with_a_password_is_a_secret_of_the_build(stack, tmp_path):
    index = "https://reader:hunter2secret@index.example/simple"

    with stack.build_inputs({"PIP_INDEX_URL": index, "PIP_FIND_LINKS": str(tmp_path)}) as options:
        [secret] = [each for each in options if each.startswith("id=index,src=")]
        text = Path(secret.removeprefix("id=index,src=")).read_text()

    assert index in text
    assert "hunter2secret" not in " ".join(options)
    assert f"wheels={tmp_path}" in options


def test_services_start_after_those_that_they_need(stack):
    order = list(stack.services({"prefect"}))

    assert set(order) == set(SERVICES)
    assert all(
        order.index(needed) < order.index(name)
        for name, service in SERVICES.items()
        for needed in service.get("depends_on", {})
    )
    assert "prefect-server" not in stack.services(set())
