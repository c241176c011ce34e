from __future__ import annotations

import json
import stat
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException
from psycopg.pq import Conninfo
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from examples.ports import free_port
from shoal.airflow import hooks
from shoal.airflow.hooks import ComputePoolHook, database_url, spec_of
from shoal.airflow.operators.nodes import LeasePoolOperator
from shoal.data.connections import parse_settings
from shoal.errors import InvalidArgumentError, NoPoolError
from shoal.pool.api import ComputePool
from shoal.pool.backends.ray.backend import Cluster, RayBackend
from shoal.pool.endpoint import keep_token, token_path
from shoal.pool.spec import PoolSpec


@pytest.fixture
def connect(monkeypatch):
    def make(uri: str) -> ComputePoolHook:
        monkeypatch.setenv("AIRFLOW_CONN_A_POOL", uri)
        return ComputePoolHook("a_pool")

    return make


def as_json(**extra) -> str:
    return json.dumps({"conn_type": "compute_pool", "host": "retrain", "extra": extra})


def with_token(token: str, **extra) -> str:
    extra = {"address": "http://10.0.0.5:8265", **extra}
    return json.dumps({"conn_type": "compute_pool", "host": "lab", "schema": "ray", "password": token, "extra": extra})


@pytest.mark.parametrize(
    ("connection", "uri"),
    [
        ("compute-pool://retrain", "local://retrain"),
        ("compute-pool://retrain/local?max_nodes=8&idle_timeout=none", "local://retrain?max_nodes=8&idle_timeout=none"),
        (as_json(max_nodes=8), "local://retrain?max_nodes=8"),
        (as_json(backend="local"), "local://retrain"),
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
        (as_json(name="other"), 'must not contain "name"'),
        ("compute-pool://retrain/local?backend=ray", "names two backends, local in its schema and ray in its extra"),
        (
            "compute-pool://:secret@retrain/local",
            "only for ray:// pools, as the token of the Ray cluster: remove the password",
        ),
        (
            with_token("secret", token_file="/run/token"),
            "a password and the option token_file: use only one",
        ),
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


def test_the_default_connection_is_used_if_it_exists_and_nothing_else_is_given(monkeypatch, fresh_home):
    monkeypatch.setenv("AIRFLOW_CONN_COMPUTE_POOL_DEFAULT", "compute-pool://by-default?max_nodes=3")
    assert ComputePoolHook().spec.uri == "local://by-default?max_nodes=3"
    assert ComputePoolHook(pool_name="other").spec is None
    monkeypatch.delenv("AIRFLOW_CONN_COMPUTE_POOL_DEFAULT")
    assert ComputePoolHook().spec is None


@pytest.mark.parametrize(
    ("of_run", "of_connection", "owner", "team"),
    [
        ("run", "connection", "owner", "run"),
        (None, "connection", "owner", "connection"),
        (None, None, "owner", "owner"),
        (None, None, "airflow", None),
        (None, None, "*", None),
    ],
)
def test_the_team_of_a_task(fresh_home, monkeypatch, of_run, of_connection, owner, team):
    extra = {} if of_connection is None else {"team": of_connection}
    connection = {"conn_type": "compute_pool", "host": "retrain", "schema": "local", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_POOL", json.dumps(connection))
    task = LeasePoolOperator(task_id="lease", size=1, compute_pool_conn_id="pool", owner=owner)
    monkeypatch.setattr(LeasePoolOperator, "holder_in", lambda self, context: "airflow:tests:dag/run")
    # Airflow 3.2 gives tasks a DAG run without the team.
    run = SimpleNamespace(dag_id="dag", **({} if of_run is None else {"team_name": of_run}))
    assert task.pool_in({"dag_run": run}).team == team


def test_a_pool_on_kubernetes_takes_the_credentials_of_a_kubernetes_connection(connect, monkeypatch):
    extra = {"kube_config_path": "/etc/kube/config", "cluster_context": "prod", "namespace": "ml", "in_cluster": False}
    monkeypatch.setenv("AIRFLOW_CONN_K8S", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    hook = connect(as_json(backend="kuberay", kubernetes_conn_id="k8s", context="test", image="shoal-node"))
    assert hook.spec.uri == "kuberay://ml/retrain?kubeconfig=/etc/kube/config&context=test&image=shoal-node"
    monkeypatch.setenv("AIRFLOW_CONN_K8S", json.dumps({"conn_type": "kubernetes", "extra": {"kube_config": "{}"}}))
    with pytest.raises(InvalidArgumentError, match='put the path into the extra as "kube_config_path"'):
        _ = connect(as_json(backend="kuberay", kubernetes_conn_id="k8s")).spec


def test_a_connection_that_does_not_exist_may_be_the_name_of_a_pool(fresh_home):
    with pytest.raises(AirflowNotFoundException, match="write pool_name='retrain' if this is the name of a pool"):
        _ = ComputePoolHook("retrain").spec


def test_the_password_of_a_connection_is_kept_in_a_private_file_only(connect, fresh_home):
    spec = connect(with_token("first")).spec
    path = token_path(spec)
    assert path.read_text() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "first" not in spec.uri + repr(spec)
    spec = connect(with_token("second")).spec
    assert (token_path(spec), path.read_text()) == (path, "second")
    assert [one.name for one in path.parent.iterdir()] == ["lab"]
    # The home folder of another host or user has its own copy.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(fresh_home / "other"))
        assert token_path(spec) != path


def test_a_check_of_a_connection_writes_no_token(connect, fresh_home):
    hook = connect(with_token("secret"))
    assert spec_of(hook.get_connection("a_pool"), keep=False).token_file is None
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(Cluster, "nodes", lambda self: asked.append(self.head._headers()["Authorization"]) or ["head"])
        works, message = hook.test_connection()
    assert works and message.endswith("creates it; the cluster at http://10.0.0.5:8265 answers, and has 1 node")
    assert asked == ["Bearer secret"]
    works, message = connect(with_token("secret", address=f"http://127.0.0.1:{free_port()}")).test_connection()
    assert not works and "127.0.0.1" in message
    assert not list(fresh_home.glob("tokens*"))


def test_a_deleted_pool_leaves_no_token(fresh_home):
    spec = PoolSpec.parse("ray://lab?address=http://10.0.0.5:8265&token_file=" + keep_token("lab", "secret"))
    RayBackend().discard("lab", everything=False)
    assert token_path(spec).read_text() == "secret"
    RayBackend().discard("lab", everything=True)
    assert not token_path(spec).exists()


@pytest.mark.parametrize(
    ("connection", "url"),
    [
        ("postgresql://me:p%40ss@db:5433/warehouse", "postgresql+psycopg://me:p%40ss@db:5433/warehouse"),
        (json.dumps({"conn_type": "sqlite", "host": "/data/w.db"}), "sqlite:////data/w.db"),
        (json.dumps({"conn_type": "trino", "extra": {"sqlalchemy_url": "trino://u@a/d", "verify": 1}}), "trino://u@a/d"),
        (
            "postgresql://me@db/w?sslmode=verify-full&sslrootcert=/ca.pem&options=-c+search_path%3Dml&cursor=dictcursor",
            "postgresql+psycopg://me@db/w?options=-c+search_path%3Dml&sslmode=verify-full&sslrootcert=%2Fca.pem",
        ),
        (
            json.dumps({"conn_type": "postgres", "host": "db", "extra": {"sqlalchemy_query": {"keepalives": False}}}),
            "postgresql+psycopg://db?keepalives=0",
        ),
        (
            json.dumps({"conn_type": "mysql", "host": "db", "extra": {"ssl_ca": "/ca.pem", "ssl": False, "iam": ""}}),
            "mysql+pymysql://db?ssl_ca=%2Fca.pem",
        ),
        (
            json.dumps({"conn_type": "mssql", "host": "db", "extra": {"encryption": "require"}}),
            "mssql+pymssql://db?encryption=require",
        ),
        (
            json.dumps(
                {
                    "conn_type": "snowflake", "login": "me", "password": "p@ss", "schema": "ml",
                    "extra": {"account": "a", "region": "eu-west-1", "database": "wh", "warehouse": "big", "role": "r"},
                }
            ),
            "snowflake://me:p%40ss@a.eu-west-1/wh/ml?role=r&warehouse=big",  # of snowflake.sqlalchemy.URL
        ),
    ],
)  # fmt: skip
def test_a_connection_to_a_database_is_a_url(monkeypatch, connection, url):
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", connection)
    assert database_url("warehouse") == url
    assert database_url("no_such_connection") is None


@pytest.mark.parametrize(
    ("kind", "extra", "said"),
    [
        ("postgres", {"iam": True, "sslmode": "require"}, "has iam, which"),
        ("postgres", {"krbsrvname": "cAnArY", "ssl_mode": "cAnArY"}, "has krbsrvname, ssl_mode, which"),
        ("mysql", {"ssl": {"ca": "cAnArY"}}, 'has ssl, which.*"mysql\\+pymysql://HOST'),
        ("trino", {"protocol": "https"}, "has protocol, which.*shoal passes no extras"),
        ("postgres", "sslmode=cAnArY", "is not a JSON object"),
        ("postgres", {"sqlalchemy_query": "sslmode=cAnArY"}, '"sqlalchemy_query".* is not a JSON object'),
    ],
)
def test_an_option_of_a_connection_that_cannot_be_passed_on_is_refused(monkeypatch, kind, extra, said):
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": kind, "host": "db", "extra": extra}))

    with pytest.raises(InvalidArgumentError, match=said) as caught:
        database_url("warehouse")

    assert "cAnArY" not in str(caught.value)


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        (
            "aws://AKIA:s%2Fcret@/?region_name=eu-west-1&endpoint_url=http%3A%2F%2Fs3%3A9000",
            {
                "aws_access_key_id": "AKIA", "aws_secret_access_key": "s/cret", "region_name": "eu-west-1",
                "endpoint_url": "http://s3:9000",
            },
        ),
        ('{"conn_type": "aws", "extra": {"role_arn": "arn:aws:iam::1:role/x"}}', {"role_arn": "arn:aws:iam::1:role/x"}),
        (
            '{"conn_type": "iceberg", "host": "https://rest", "login": "me", "password": "w", "extra": {"scope": "a"}}',
            {"uri": "https://rest", "credential": "me:w", "scope": "a"},
        ),
    ],
)  # fmt: skip
def test_a_connection_has_the_settings_of_a_storage_or_catalog(monkeypatch, connection, expected):
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", connection)
    variable = "SHOAL_CATALOG_LAKE" if "iceberg" in connection else "SHOAL_STORAGE_LAKE"
    assert parse_settings(variable, database_url("lake")) == expected


@pytest.mark.processes
def test_postgresql_gets_the_options_of_a_connection(monkeypatch, postgres):
    url = make_url(postgres.url("postgres"))
    connection = {
        "conn_type": "postgres", "host": url.host, "port": url.port, "login": url.username, "password": url.password,
        "schema": url.database,
        "extra": {"options": "-c search_path=ml", "application_name": "a b", "connect_timeout": 9},
    }  # fmt: skip
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps(connection))

    with create_engine(database_url("warehouse"), poolclass=NullPool).connect() as connected:
        assert connected.exec_driver_sql("SHOW search_path").scalar() == "ml"
        assert connected.exec_driver_sql("SHOW application_name").scalar() == "a b"
    # Without the fields of a connection, these are all options that the driver knows.
    options = {option.keyword.decode() for option in Conninfo.get_defaults()}
    assert hooks._DIALECTS["postgres"].passed <= options


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
