"""Take credentials for a job from Airflow's Variables and connections when the job is submitted.

They are read here and not rendered as templates, because Airflow stores and shows rendered fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from airflow.sdk import BaseHook, Variable

from shoal.airflow.connections import extra_of
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.sdk import Connection


def secret_variable(name: str) -> str | None:
    """Return the value of an Airflow Variable; None if there is no Variable of this name.

    :param name: Name of the Variable, such as ``HF_TOKEN``.
    """
    value: str | None = Variable.get(name, default=None)
    return value


def environment_of(conn_ids: Iterable[str]) -> dict[str, str]:
    """Return the environment variables by which MLflow, S3 and other storage take the credentials of connections.

    An empty value replaces a variable of the worker that belongs to other credentials, such as a session token.

    :param conn_ids: Ids of connections of the types `aws`, `mlflow`, `http`, `databricks`, `google_cloud_platform` and
        `wasb`.
    :raises InvalidArgumentError: A connection is of another type, or has credentials that no variable can carry.
    """
    found: dict[str, str] = {}
    for conn_id in conn_ids:
        connection = BaseHook.get_connection(conn_id)
        variables = _VARIABLES.get(connection.conn_type or "")
        if variables is None:
            raise InvalidArgumentError(
                f'the connection "{conn_id}" of type {connection.conn_type!r} has no credentials for a job: use a '
                f"connection of type {', '.join(sorted(_VARIABLES))}, or name a Variable in run_config.secret_env"
            )
        extra = extra_of(connection, example='{"region_name": "eu-west-1"}')
        found |= {name: str(value or "") for name, value in variables(connection, extra).items()}
    return found


def _of_aws(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    if extra.keys() & {"role_arn", "profile_name", "assume_role_method"}:
        found = _by_amazons_hook(str(connection.conn_id))
    elif connection.login:
        found = _keys(connection.login, connection.password, extra.get("aws_session_token"))
    if region := extra.get("region_name"):
        found["AWS_DEFAULT_REGION"] = region
    if endpoint := extra.get("endpoint_url"):
        found["AWS_ENDPOINT_URL"] = found["MLFLOW_S3_ENDPOINT_URL"] = endpoint
    return found


def _keys(key: object, secret: object, token: object) -> dict[str, object]:
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_SESSION_TOKEN": token,
        "AWS_PROFILE": "",
    }


def _by_amazons_hook(conn_id: str) -> dict[str, object]:
    """Return temporary keys of a role or a profile, which only Amazon's provider can get."""
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook  # type: ignore[import-not-found]
    except ImportError:
        raise InvalidArgumentError(
            f'the connection "{conn_id}" uses a role or a profile: install apache-airflow-providers-amazon in the '
            "environment of the task, or write keys into the connection"
        ) from None
    found = AwsGenericHook(aws_conn_id=conn_id, client_type="sts").get_credentials()
    return _keys(found.access_key, found.secret_key, found.token)


def _of_mlflow(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    user = connection.login
    return {
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": user and connection.password,
        "MLFLOW_TRACKING_TOKEN": None if user else connection.password,
    }


def _of_databricks(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    host = connection.host or ""
    return {
        "DATABRICKS_HOST": host if "://" in host or not host else f"https://{host}",
        "DATABRICKS_TOKEN": extra.get("token") or connection.password,
    }


def _of_google(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    if not (path := extra.get("key_path")):
        raise InvalidArgumentError(
            f'the connection "{connection.conn_id}" has no key_path in its extra: libraries take the key of a service '
            "account only from a file, which the nodes need at the same path"
        )
    return {"GOOGLE_APPLICATION_CREDENTIALS": path}


def _of_azure(connection: Connection, extra: Mapping[str, object]) -> dict[str, object]:
    return {
        "AZURE_STORAGE_CONNECTION_STRING": extra.get("connection_string"),
        "AZURE_STORAGE_ACCOUNT_NAME": connection.login,
        "AZURE_STORAGE_ACCOUNT_KEY": connection.password,
        "AZURE_STORAGE_SAS_TOKEN": extra.get("sas_token"),
    }


_VARIABLES: dict[str, Callable[[Connection, Mapping[str, object]], dict[str, object]]] = {
    "aws": _of_aws,
    "databricks": _of_databricks,
    "google_cloud_platform": _of_google,
    "http": _of_mlflow,
    "mlflow": _of_mlflow,
    "wasb": _of_azure,
}
"""The function that finds the variables, by the type of a connection."""
