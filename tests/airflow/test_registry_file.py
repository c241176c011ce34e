"""`.airflow-registry.yaml` names what the provider has."""

from __future__ import annotations

import inspect
import tomllib
from importlib import import_module

import yaml
from airflow.sdk import BaseHook, BaseOperator

from shoal.airflow import get_provider_info
from tests.support import ROOT

FILE = yaml.safe_load((ROOT / ".airflow-registry.yaml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_registry_lists_all_operators_sensors_and_hooks():
    for section in ("operators", "sensors", "hooks"):
        module = import_module(f"shoal.airflow.{section}")
        classes = {
            f"{module.__name__}.{name}"
            for name, found in vars(module).items()
            if inspect.isclass(found) and issubclass(found, BaseOperator | BaseHook)
            if found.__module__.startswith(module.__name__)
        }
        assert {entry["module"] for entry in FILE[section]} == classes


def test_the_registry_has_the_names_and_addresses_of_the_package():
    assert FILE["package-name"] == PROJECT["name"]
    assert FILE["description"] == get_provider_info()["description"]
    assert FILE["docs-url"] == PROJECT["urls"]["Documentation"]
    assert FILE.get("source-url") == PROJECT["urls"].get("Source")
