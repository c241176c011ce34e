"""The DAG of docs/airflow.md is what it says: a few lines that lease, train and give back."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "airflow.md"


def test_the_guides_dag_has_its_setup_and_teardown():
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    scope: dict = {}
    exec(code.replace("\ndelays()", "\nfound = delays()"), scope)
    dag = scope["found"]
    assert dag.get_task("lease_pool").downstream_task_ids == {"train", "clean_up_pool"}
    assert dag.get_task("clean_up_pool").is_teardown
    assert dag.get_task("train").upstream_task_ids == {"lease_pool"}


def test_every_option_of_the_example_configuration_exists():
    from configparser import ConfigParser

    from airflow.configuration import conf

    example = ConfigParser()
    example.read(GUIDE.parents[1] / "airflow.cfg.example")
    for section in example.sections():
        for option in example.options(section):
            assert conf.has_option(section, option), f"[{section}] {option}"
