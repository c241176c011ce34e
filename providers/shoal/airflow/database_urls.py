"""Convert Airflow connections to databases to SQLAlchemy URLs, including the driver options in their extra field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from shoal.airflow.connections import extra_of
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from sqlalchemy import URL

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
    if unknown := sorted(name for name, value in given.items() if name not in known or not _is_text(value)):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" has {", ".join(unknown)}, which shoal cannot pass to the '
            f"database: remove it, or write the whole SQLAlchemy URL, with user and password, into the extra: "
            f'{{"sqlalchemy_url": "{dialect.name}://HOST/DATABASE?OPTION=VALUE"}}. Without this URL, shoal passes '
            f"{', '.join(sorted(known)) or 'no extras'}"
        )
    return {name: _text(value) for name, value in given.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str | int | float)


def _text(value: object) -> str:
    # The drivers read 1 and 0, and not all of them read true and false.
    return str(int(value)) if isinstance(value, bool) else str(value)


def _url(connection: Connection, dialect: _Dialect, fields: Mapping[str, str]) -> URL:
    """Return the URL of a connection without options."""
    from sqlalchemy import URL

    if dialect.name == "sqlite":
        return URL.create("sqlite", database=connection.host or connection.schema)
    host, database = connection.host, connection.schema
    # Snowflake's URL has the account in place of the host, and the schema after the database.
    if "account" in fields:
        host = _joined(".", fields["account"], fields.get("region"))
    if "database" in fields:
        database = _joined("/", fields["database"], connection.schema)
    return URL.create(
        dialect.name,
        username=connection.login,
        password=connection.password,
        host=host,
        port=connection.port,
        database=database,
    )


def _joined(separator: str, *parts: str | None) -> str:
    return separator.join(part for part in parts if part)
