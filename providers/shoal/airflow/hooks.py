"""Read Airflow connections: as a compute pool (the hook), as the URL of a database, and as credentials for a job.

Credentials are read when the job is submitted and not rendered as templates, because Airflow stores and shows rendered
fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import BaseHook, Variable
from airflow.sdk.exceptions import AirflowNotFoundException
from sqlalchemy import URL

from shoal.airflow import CONNECTION_TYPE, HOOK_NAME
from shoal.errors import InvalidArgumentError, PoolNotFoundError, ShoalError
from shoal.pool.spec import PoolSpec, is_uri, refuse_definition

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from shoal.pool.api import ComputePool


def extra_of(connection: Connection, *, example: str) -> Mapping[str, Any]:
    """Return the extra field of an Airflow connection.

    :param example: A valid extra field, for the error message.
    :raises InvalidArgumentError: The field is not a JSON object.
    """
    try:
        # If the extra is not valid JSON, Airflow's `extra_dejson` returns an empty dict without an error. So the extra
        # is first parsed with `json.loads`, which raises an error.
        json.loads((connection.extra or "").strip() or "{}")
        extra = connection.extra_dejson
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, Mapping):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" is not a JSON object: write options such as {example}'
        )
    return extra


def spec_of(connection: Connection, *, keep: bool = True) -> PoolSpec:
    """Convert an Airflow connection to the definition of a pool.

    :param connection: Connection of type ``compute_pool``. The connection's host is the pool's name, its extra contains
        the options, and its password is the token of a Ray cluster. The connection's schema, or the option ``backend``,
        is the backend. The option ``kubernetes_conn_id`` is the id of a connection of type ``kubernetes``.
    :param keep: Whether the token is written to a file in ``$SHOAL_HOME``. False: the connection is only checked.
    """
    if not connection.host:
        raise InvalidArgumentError(
            f'connection "{connection.conn_id}" names no pool: write the name of the pool into the host field'
        )
    extra = extra_of(connection, example='{"max_nodes": 4}')
    # Airflow's form also stores the fields that the user left empty. Empty fields are dropped here, so that their
    # defaults apply.
    given = {name: value for name, value in extra.items() if value not in (None, "") and name != "team"}
    if "name" in given:
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" must not contain "name": write the name of the pool into '
            "the host field"
        )
    backend = given.pop("backend", None)
    if backend and connection.schema and backend != connection.schema:
        raise InvalidArgumentError(
            f'connection "{connection.conn_id}" names two backends, {connection.schema} in its schema and {backend} in '
            f"its extra: choose {connection.schema} in Airflow's form, or create the connection again without a schema"
        )
    if conn_id := given.pop("kubernetes_conn_id", None):
        given = {**_kubernetes_options(conn_id), **given}
    fields = {"backend": backend or connection.schema or "local", "name": connection.host, **given}
    spec = PoolSpec.parse(fields)
    if not connection.password:
        return spec
    from shoal.pool.endpoint import check_token, with_token

    check_token(spec, f'connection "{connection.conn_id}"', "password")
    return with_token(spec, connection.password) if keep else spec


def _kubernetes_options(conn_id: str) -> dict[str, Any]:
    """Return the options of a `kuberay://` pool that a connection of type ``kubernetes`` contains."""
    extra = extra_of(BaseHook.get_connection(conn_id), example='{"kube_config_path": "/etc/kube/config"}')
    if extra.get("kube_config"):
        raise InvalidArgumentError(
            f'connection "{conn_id}" contains a kubeconfig as JSON: write it to a file that all hosts of shoal have, '
            'and put the path into the extra as "kube_config_path", because processes of shoal outlive the task'
        )
    names = {"kubeconfig": "kube_config_path", "context": "cluster_context", "namespace": "namespace"}
    return {option: extra[name] for option, name in names.items() if extra.get(name)}


_OF_ALL_HOOKS = frozenset(
    (
        "dialect", "escape_column_names", "escape_word_format", "insert_statement_format", "placeholder",
        "replace_statement_format",
    )
)  # fmt: skip
"""Extras with which Airflow's own hooks write SQL; a connection to a database does not need them."""

_SWITCHES = frozenset(("iam", "insecure_mode", "ssl"))
"""Extras that request nothing if they are false, as Airflow's form stores them."""


@dataclass(frozen=True)
class _Dialect:
    """SQLAlchemy's dialect for one type of Airflow connections.

    Attributes:
        name: Name of the dialect and its driver.
        passed: Extras that the driver accepts as texts in the query of a URL. The driver's options that need another
            type, Kerberos, or a service that only hooks use (IAM), are missing.
        ignored: Extras that only Airflow's hooks use.
        fields: Extras that are no options of the driver, but part of the URL before the query.
    """

    name: str
    passed: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()


_DIALECTS = {
    "postgres": _Dialect(
        "postgresql+psycopg",
        passed=frozenset(
            (
                "application_name", "channel_binding", "client_encoding", "connect_timeout",
                "fallback_application_name", "gssencmode", "hostaddr", "keepalives", "keepalives_count",
                "keepalives_idle", "keepalives_interval", "load_balance_hosts", "max_protocol_version",
                "min_protocol_version", "options", "passfile", "require_auth", "requirepeer",
                "ssl_max_protocol_version", "ssl_min_protocol_version", "sslcert", "sslcertmode", "sslcompression",
                "sslcrl", "sslcrldir", "sslkey", "sslmode", "sslnegotiation", "sslpassword", "sslrootcert", "sslsni",
                "target_session_attrs", "tcp_user_timeout",
            )
        ),
        ignored=frozenset(
            (
                "aws_conn_id", "cluster-identifier", "cursor", "redshift", "redshift-serverless", "sqlalchemy_scheme",
                "workgroup-name",
            )
        ),
    ),
    "mysql": _Dialect(
        "mysql+pymysql",
        passed=frozenset(
            (
                "charset", "connect_timeout", "init_command", "program_name", "read_timeout", "ssl_ca", "ssl_capath",
                "ssl_cert", "ssl_check_hostname", "ssl_cipher", "ssl_key", "unix_socket", "write_timeout",
            )
        ),
        ignored=frozenset(("aws_conn_id", "client", "cursor", "local_infile")),
    ),
    "mssql": _Dialect(
        "mssql+pymssql", passed=frozenset(("appname", "charset", "encryption", "login_timeout", "tds_version"))
    ),
    "snowflake": _Dialect(
        "snowflake",
        passed=frozenset(("authenticator", "role", "warehouse")),
        fields=frozenset(("account", "database", "region")),
    ),
    # shoal opens only files that exist, and only reads them, so `mode` changes nothing.
    "sqlite": _Dialect("sqlite", passed=frozenset(("timeout",)), ignored=frozenset(("mode",))),
}  # fmt: skip


def database_url(conn_id: str) -> str | None:
    """Return the SQLAlchemy URL of an Airflow connection to a database; None if there is no such connection.

    Of a connection of type ``aws`` or ``iceberg``, the settings of a storage or the properties of a catalog are
    returned, as JSON.

    :param conn_id: Id of the connection. Options in the connection's extra field become options of the URL. If shoal
        does not know an option, write the whole URL into the extra field: ``{"sqlalchemy_url": "..."}``.
    :raises InvalidArgumentError: The extra field has an option that shoal cannot pass on, or is not a JSON object.
    """
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return None
    extra = extra_of(connection, example='{"sslmode": "verify-full"}')
    if url := extra.get("sqlalchemy_url"):
        return str(url)
    login, password = connection.login, connection.password
    if connection.conn_type == "aws":
        return json.dumps({"aws_access_key_id": login, "aws_secret_access_key": password, **extra})
    if connection.conn_type == "iceberg":
        return json.dumps({"uri": connection.host, **({"credential": f"{login}:{password}"} if login else {}), **extra})
    dialect = _DIALECTS.get(connection.conn_type or "", _Dialect(connection.conn_type or ""))
    options = _options(connection, dialect, extra)
    fields = {name: options.pop(name) for name in dialect.fields & options.keys()}
    return _url(connection, dialect, fields).update_query_dict(options).render_as_string(hide_password=False)


def _options(connection: Connection, dialect: _Dialect, extra: Mapping[str, Any]) -> dict[str, str]:
    """Return the extras for the URL of a connection, as texts."""
    query = extra.get("sqlalchemy_query") or {}
    if not isinstance(query, Mapping):
        raise InvalidArgumentError(
            f'"sqlalchemy_query" in the extra of connection "{connection.conn_id}" is not a JSON object: write options '
            'such as {"sqlalchemy_query": {"sslmode": "verify-full"}}'
        )
    given = {
        name: value
        for name, value in {**extra, **query}.items()
        if name not in _OF_ALL_HOOKS | dialect.ignored | {"sqlalchemy_query", "sqlalchemy_url"}
        # Airflow's form also stores the fields that the user left empty.
        and value not in (None, "") and not (name in _SWITCHES and value in (False, "false", "False", 0, "0"))
    }  # fmt: skip
    known = dialect.passed | dialect.fields
    texts = str | int | float
    if unknown := sorted(name for name, value in given.items() if name not in known or not isinstance(value, texts)):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" has {", ".join(unknown)}, which shoal cannot pass to the '
            f"database: remove it, or write the whole SQLAlchemy URL, with user and password, into the extra: "
            f'{{"sqlalchemy_url": "{dialect.name}://HOST/DATABASE?OPTION=VALUE"}}. Without this URL, shoal passes '
            f"{', '.join(sorted(known)) or 'no extras'}"
        )
    # The drivers read 1 and 0, and not all of them read true and false.
    return {name: str(int(value) if isinstance(value, bool) else value) for name, value in given.items()}


def _url(connection: Connection, dialect: _Dialect, fields: Mapping[str, str]) -> URL:
    """Return the URL of a connection without options."""

    if dialect.name == "sqlite":
        return URL.create("sqlite", database=connection.host or connection.schema)
    host, database = connection.host, connection.schema
    # Snowflake's URL has the account in place of the host, and the schema after the database.
    if "account" in fields:
        host = ".".join(filter(None, (fields["account"], fields.get("region"))))
    if "database" in fields:
        database = "/".join(filter(None, (fields["database"], connection.schema)))
    return URL.create(
        dialect.name,
        username=connection.login,
        password=connection.password,
        host=host,
        port=connection.port,
        database=database,
    )


def secret_variable(name: str) -> str | None:
    """Return the value of an Airflow Variable; None if there is no Variable of this name.

    :param name: Name of the Variable, such as ``HF_TOKEN``.
    """
    return cast("str | None", Variable.get(name, default=None))


def environment_of(conn_ids: Iterable[str]) -> dict[str, str]:
    """Return the environment variables by which MLflow, S3 and other storage take the credentials of connections.

    An empty value replaces a variable of the worker that belongs to other credentials, such as a session token.

    :param conn_ids: Ids of connections of the types in `_WITH_CREDENTIALS`.
    :raises InvalidArgumentError: A connection is of another type, or has credentials that no variable can carry.
    """
    found: dict[str, str] = {}
    for conn_id in conn_ids:
        connection = BaseHook.get_connection(conn_id)
        if connection.conn_type not in _WITH_CREDENTIALS:
            raise InvalidArgumentError(
                f'the connection "{conn_id}" of type {connection.conn_type!r} has no credentials for a job: use a '
                f"connection of type {', '.join(_WITH_CREDENTIALS)}, or name a Variable in run_config.secret_env"
            )
        extra = extra_of(connection, example='{"region_name": "eu-west-1"}')
        found |= {name: str(value or "") for name, value in _variables(connection, extra).items()}
    return found


_WITH_CREDENTIALS = ("aws", "databricks", "google_cloud_platform", "http", "mlflow", "wasb")
"""Types of connections whose credentials a job can get."""


def _variables(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    user, password, host = connection.login, connection.password, connection.host or ""
    match connection.conn_type:
        case "aws":
            return _of_aws(connection, extra)
        case "databricks":
            return {
                "DATABRICKS_HOST": host if "://" in host or not host else f"https://{host}",
                "DATABRICKS_TOKEN": extra.get("token") or password,
            }
        case "google_cloud_platform":
            if not (path := extra.get("key_path")):
                raise InvalidArgumentError(
                    f'the connection "{connection.conn_id}" has no key_path in its extra: libraries take the key of a '
                    "service account only from a file, which the nodes need at the same path"
                )
            return {"GOOGLE_APPLICATION_CREDENTIALS": path}
        case "wasb":
            return {
                "AZURE_STORAGE_CONNECTION_STRING": extra.get("connection_string"),
                "AZURE_STORAGE_ACCOUNT_NAME": user,
                "AZURE_STORAGE_ACCOUNT_KEY": password,
                "AZURE_STORAGE_SAS_TOKEN": extra.get("sas_token"),
            }
    # The types mlflow and http are servers of MLflow.
    return {
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": user and password,
        "MLFLOW_TRACKING_TOKEN": None if user else password,
    }


def _of_aws(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    keys: tuple[object, ...] = ()
    if extra.keys() & {"role_arn", "profile_name", "assume_role_method"}:
        # Only Amazon's provider can get the temporary keys of a role or a profile.
        try:
            from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook  # type: ignore[import-not-found]
        except ImportError:
            raise InvalidArgumentError(
                f'the connection "{connection.conn_id}" uses a role or a profile: install '
                "apache-airflow-providers-amazon in the environment of the task, or write keys into the connection"
            ) from None
        hook = AwsGenericHook(aws_conn_id=connection.conn_id, client_type="sts")
        temporary = hook.get_credentials()
        keys = temporary.access_key, temporary.secret_key, temporary.token
    elif connection.login:
        keys = connection.login, connection.password, extra.get("aws_session_token")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
    found: dict[str, object] = dict(zip(names, (*keys, ""), strict=True)) if keys else {}
    if region := extra.get("region_name"):
        found["AWS_DEFAULT_REGION"] = region
    if endpoint := extra.get("endpoint_url"):
        found["AWS_ENDPOINT_URL"] = found["MLFLOW_S3_ENDPOINT_URL"] = endpoint
    return found


class ComputePoolHook(BaseHook):
    """Hook for one compute pool. The pool is selected by an Airflow connection, a name or a URI.

    Without connection and name, the hook uses the connection ``compute_pool_default`` if it exists, else the pool that
    ``$SHOAL_POOL`` names, else the only pool that is up.

    The connection's host is the name of the pool, its schema is the backend (``local``), and its extra contains the
    options of a pool URI: ``compute-pool://retrain/local?max_nodes=4``. The connection's password is the token of a Ray
    cluster.

    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``. Pass at most one of
        `compute_pool_conn_id` and `pool_name`.
    :param pool_name: Name or URI (``local://retrain?max_nodes=4``) of the pool.
    """

    conn_name_attr = "compute_pool_conn_id"
    default_conn_name = "compute_pool_default"
    conn_type = CONNECTION_TYPE
    hook_name = HOOK_NAME

    def __init__(self, compute_pool_conn_id: str | None = None, pool_name: str | None = None) -> None:
        super().__init__()
        if compute_pool_conn_id and pool_name:
            raise InvalidArgumentError(
                f"compute_pool_conn_id={compute_pool_conn_id!r} and pool_name={pool_name!r} are both given: pass only "
                "one of them"
            )
        refuse_definition(pool_name)
        self.compute_pool_conn_id = compute_pool_conn_id
        self.pool_name = pool_name

    @cached_property
    def spec(self) -> PoolSpec | None:
        """Return the pool's definition from the connection or URI; None if only the pool's name is known.

        Without a definition, the pool cannot be brought up. If the connection has a token, the token is written to a
        file in ``$SHOAL_HOME`` (mode 0600), because the pool's processes cannot read Airflow's connections.
        """
        if self._defining_connection is not None:
            return spec_of(self._defining_connection)
        return PoolSpec.parse(self.pool_name) if self.pool_name and is_uri(self.pool_name) else None

    @property
    def is_defined_by_connection(self) -> bool:
        """Return whether a connection defines the pool. Who may edit connections may also define the pool anew."""
        return self._defining_connection is not None

    @cached_property
    def team(self) -> str | None:
        """Return the team for which tasks with this connection act: the value ``team`` in the connection's extra
        (``{"team": "fraud"}``). None if the extra names no team."""
        connection = self._defining_connection
        return None if connection is None else connection.extra_dejson.get("team") or None

    @cached_property
    def _defining_connection(self) -> Connection | None:
        """Return the connection that defines the pool; None if `pool_name` selects the pool, or if no connection
        exists."""
        given = self.compute_pool_conn_id
        if self.pool_name and not given:
            return None
        try:
            return self.get_connection(given or self.default_conn_name)
        except AirflowNotFoundException:
            if not given:
                return None
            raise AirflowNotFoundException(
                f'there is no connection "{given}" of type {CONNECTION_TYPE}: create the connection, or write '
                f"pool_name={given!r} if this is the name of a pool"
            ) from None

    def pool(self, holder: str | None = None, *, team: str | None = None) -> ComputePool:
        """Return a client of the pool, with methods such as ``up()``, ``lease()`` and ``scale()``.

        :param holder: Name of the holder that will own the leases and jobs requested through this client; see
            :func:`shoal.airflow.deployment.holder_of`. By default, a name made from user, host and process id.
        :param team: Team for which the client acts. By default, the team of the connection, else ``$SHOAL_TEAM``.
        """
        # Imported only here, because DAG files also import this module, and do not need the store.
        from shoal.pool.api import ComputePool

        return ComputePool(self.spec or self.pool_name, holder=holder, team=team or self.team)

    def get_conn(self) -> ComputePool:
        """Return a client of the pool. Every hook of Airflow has this method."""
        return self.pool()

    def test_connection(self) -> tuple[bool, str]:
        """Return whether the connection is valid, and a message with the pool's state. For a ``ray://`` pool, also ask
        the cluster with the connection's token."""
        from shoal.pool.api import ComputePool

        spec, answered = None, ""
        try:
            # A test must not write the token: a pool in use reads the file, and the token may be wrong.
            connection = self._defining_connection
            spec = self.spec if connection is None else spec_of(connection, keep=False)
            if spec is not None and spec.backend == "ray":
                from shoal.pool.backends.ray.backend import Cluster

                token = None if connection is None else connection.password or None
                count = len(Cluster(spec, token).nodes())
                nodes = f"{count} {'node' if count == 1 else 'nodes'}"
                answered = f"; the cluster at {spec.address} answers, and has {nodes}"
            status = ComputePool(spec or self.pool_name).describe()
        except ShoalError as error:
            if isinstance(error, PoolNotFoundError) and spec is not None:
                untried = " and contacts the cluster" if spec.backend == "kuberay" else ""
                return (
                    True,
                    f"{spec.uri} does not exist yet: the first run that leases nodes creates it{untried}{answered}",
                )
            return False, str(error)
        return (
            True,
            f"{status.uri} is {status.state}, {len(status.active)} of {status.max_nodes} nodes active{answered}",
        )
