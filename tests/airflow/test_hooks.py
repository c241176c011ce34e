from __future__ import annotations

import json

import pytest

from shoal.airflow.hooks import ComputePoolHook, database_url
from shoal.errors import InvalidArgumentError, NoPoolError
from shoal.pool.api import ComputePool


@pytest.fixture
def connect(monkeypatch):
    def make(uri: str) -> ComputePoolHook:
        monkeypatch.setenv("AIRFLOW_CONN_A_POOL", uri)
        return ComputePoolHook("a_pool")

    return make


def as_json(**extra) -> str:
    return json.dumps({"conn_type": "compute_pool", "host": "retrain", "extra": extra})


@pytest.mark.parametrize(
    ("connection", "uri"),
    [
        ("compute-pool://retrain", "local://retrain"),
        ("compute-pool://retrain/local?max_nodes=8&idle_timeout=none", "local://retrain?max_nodes=8&idle_timeout=none"),
        (as_json(max_nodes=8), "local://retrain?max_nodes=8"),
        (as_json(max_nodes="8", min_nodes="", gpus_per_node=None), "local://retrain?max_nodes=8"),
    ],
)
def test_a_connection_is_a_pool(connect, connection, uri):
    assert connect(connection).spec.uri == uri


@pytest.mark.parametrize(
    ("connection", "said"),
    [
        ("compute-pool://", "names no pool"),
        ("compute-pool://retrain?max_node=8", "did you mean max_nodes"),
        ("compute-pool://retrain/moon", "unknown backend"),
        (as_json(max_nodes="many"), "max_nodes"),
        (
            json.dumps({"conn_type": "compute_pool", "host": "retrain", "extra": '{"max_nodes": 8'}),
            "is not a JSON object",
        ),
    ],
)
def test_a_wrong_connection_is_refused_by_name(connect, connection, said, fresh_home):
    with pytest.raises(InvalidArgumentError, match=said):
        _ = connect(connection).spec
    works, message = connect(connection).test_connection()
    assert not works
    assert said in message


@pytest.mark.parametrize(
    ("connection", "url"),
    [
        ("postgresql://me:p%40ss@db:5433/warehouse", "postgresql+psycopg://me:p%40ss@db:5433/warehouse"),
        (json.dumps({"conn_type": "sqlite", "host": "/data/w.db"}), "sqlite:////data/w.db"),
        (json.dumps({"conn_type": "snowflake", "extra": {"sqlalchemy_url": "snowflake://u@a/d"}}), "snowflake://u@a/d"),
    ],
)
def test_a_connection_to_a_database_is_a_url(monkeypatch, connection, url):
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", connection)
    assert database_url("warehouse") == url
    assert database_url("no_such_connection") is None


def test_either_name_or_connection():
    with pytest.raises(InvalidArgumentError, match="pass only one of them"):
        ComputePoolHook("a_pool", "retrain")


def test_only_a_name_defines_no_pool(fresh_home):
    assert ComputePoolHook(pool_name="retrain").spec is None
    with pytest.raises(NoPoolError):
        ComputePoolHook().pool()
    works, message = ComputePoolHook(pool_name="retrain").test_connection()
    assert not works
    assert "does not exist" in message


def test_the_test_of_a_connection_says_how_the_pool_is(connect, tiny):
    hook = connect("compute-pool://tiny?max_nodes=2")
    assert hook.test_connection() == (
        True,
        "local://tiny?max_nodes=2 does not exist yet: the first run that leases nodes creates it",
    )
    ComputePool("local://tiny?max_nodes=2").up()
    assert hook.test_connection() == (True, "local://tiny?max_nodes=2 is up, 1 of 2 nodes active")
    assert hook.get_conn().name == "tiny"
