"""Find the settings of database connections, storages and Iceberg catalogs by name, and open S3 paths that name a
storage, such as ``s3://lake@bucket/key``, with them.

Each process that reads has the settings in its environment: those of the storage ``lake`` in SHOAL_STORAGE_LAKE.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from shoal.errors import DataAccessError, DataError, InvalidArgumentError, MissingExtraError
from shoal.lazy_imports import fs, pa
from shoal.secrets.redaction import STORAGE_NAME, STORAGE_SCHEMES, redact

CONNECTION_PREFIX = "SHOAL_CONNECTION_"
"""Prefix of the names of environment variables that contain the URLs of database connections."""
STORAGE_PREFIX = "SHOAL_STORAGE_"
"""Prefix of the names of environment variables that contain the settings of storages."""
CATALOG_PREFIX = "SHOAL_CATALOG_"
"""Prefix of the names of environment variables that contain pyiceberg's properties of catalogs."""

KNOWN: dict[str, str] = {}
"""Values of such variables that this process has found elsewhere, such as in an Airflow connection."""

_LIBRARIES = ("pyarrow", "deltalake", "pyiceberg")
_SETTINGS = {
    "aws_access_key_id": ("access_key", "AWS_ACCESS_KEY_ID", "s3.access-key-id"),
    "aws_secret_access_key": ("secret_key", "AWS_SECRET_ACCESS_KEY", "s3.secret-access-key"),
    "aws_session_token": ("session_token", "AWS_SESSION_TOKEN", "s3.session-token"),
    "region_name": ("region", "AWS_REGION", "s3.region"),
    "endpoint_url": ("endpoint_override", "AWS_ENDPOINT_URL", "s3.endpoint"),
}
"""Settings of a storage, as boto3, Airflow and Prefect name them -> their names in each of the libraries."""
_KEYS = tuple(_SETTINGS)[:3]
_ROLE = "role_arn"
"""Setting of a storage: the role whose temporary keys are used. The other keys, if any, may assume it."""

_ADDRESS = re.compile(rf"({'|'.join(STORAGE_SCHEMES)})://(?:({STORAGE_NAME})@)?(?=[^@/]+(?:/|$))")

_REFUSALS = (
    ("InvalidAccessKeyId|InvalidClientTokenId|SignatureDoesNotMatch|InvalidToken", "{whose} are wrong", "Correct"),
    ("ExpiredToken", "{whose} have expired", "Name a role as role_arn, whose keys are renewed, or renew"),
    ("NoSuchBucket", "there is no bucket {bucket}", "Correct the path, or the endpoint_url in"),
    ("AccessDenied", "{whose} may not list the bucket {bucket} and get its objects", "Give them the right, or correct"),
)
"""Codes with which S3 refuses a request, the cause and the remedy."""
_RETRYABLE = ("ExpiredToken", "AccessDenied")
"""Codes after which a retry may succeed: its submitter reads the credentials again, or somebody has given the right."""


def connection_variable(name: str, prefix: str = CONNECTION_PREFIX) -> str:
    """Return the name of the environment variable with the settings of a connection, such as
    SHOAL_CONNECTION_WAREHOUSE."""
    return prefix + re.sub(r"[^A-Z0-9]", "_", name.upper())


def split_storage(path: str) -> tuple[str | None, str]:
    """Split a path into the name of its storage, which is None if it names none, and the path without the name."""
    match = _ADDRESS.match(path)
    return (match[2], f"{match[1]}://{path[match.end() :]}") if match else (None, path)


def in_storage(name: str | None, path: str) -> str:
    """Return a path with the name of its storage. Without a name, the path is unchanged.

    Raises:
        InvalidArgumentError: The name is no name, or the path is not in S3, or names another storage.
    """
    if name is None:
        return path
    match = _ADDRESS.match(path)
    if not re.fullmatch(STORAGE_NAME, name) or match is None or match[2] not in (None, name):
        # The message does not show the value, because the value may be a key.
        raise InvalidArgumentError(
            f"the value of storage does not fit the path {redact(path)}: a storage is a name of letters, digits, "
            f'"_", "-" and ".", whose settings are in {STORAGE_PREFIX}<NAME>, and opens s3://bucket/key'
        )
    return f"{match[1]}://{name}@{path[match.end() :]}"


def refuse_storage(location: str, option: str) -> None:
    """Refuse a location for files of jobs that names a storage: processes that clean up have no settings of storages.

    Raises:
        InvalidArgumentError: The location names a storage.
    """
    if split_storage(location)[0]:
        raise InvalidArgumentError(
            f"{option} {location} names a storage, which only the paths of datasets can do: omit the name, and set the "
            "credentials in the environment"
        )


def parse_settings(variable: str, text: str) -> dict[str, str]:
    """Return the settings in the value of an environment variable, which is JSON or a URI.

    Raises:
        InvalidArgumentError: The value is no JSON object, or has settings that a storage does not have.
    """
    given, problem = {}, ""
    try:
        if text.lstrip().startswith("{"):
            given = json.loads(text)
        elif variable.startswith(CATALOG_PREFIX):
            given = {"uri": text}
        else:
            parts = urlsplit(text)
            # The rest of a secret whose "/", "?" or "#" is not encoded is a path; and a URL of a database has a host.
            if parts.netloc.rpartition("@")[2] or parts.path.strip("/"):
                raise ValueError
            given = {**dict(parse_qsl(parts.query)), _KEYS[0]: parts.username, _KEYS[1]: unquote(parts.password or "")}
    except ValueError:
        problem = "a value that is neither JSON nor a URI with encoded keys and without a host"
    found = {name: str(value) for name, value in given.items() if value not in (None, "")}
    if variable.startswith(STORAGE_PREFIX):
        if unknown := sorted(found.keys() - _SETTINGS.keys() - {_ROLE}):
            problem = f"the unknown settings {', '.join(unknown)}"
        elif (_KEYS[0] in found) != (_KEYS[1] in found):
            problem = "only one of two keys"
    if problem:
        raise InvalidArgumentError(
            f"{variable}, or the connection or block of this name, has {problem}: write JSON with any of "
            f"{', '.join((*_SETTINGS, _ROLE))}"
        )
    return found


def catalog_properties(catalog: str) -> dict[str, str]:
    """Return the properties of a catalog, beside those in pyiceberg's own configuration."""
    variable = connection_variable(catalog, CATALOG_PREFIX)
    return parse_settings(variable, os.environ.get(variable) or KNOWN.get(variable) or "{}")


def storage_options(library: str, storage: str | None, query: str) -> dict[str, str]:
    """Return the options with which a library opens paths of a storage. The keys of a role are renewed: each call
    returns keys that are valid for some more minutes.

    Args:
        library: pyarrow, deltalake or pyiceberg.
        storage: Name of the storage; None for the credentials that the library finds itself.
        query: Options of the path, such as ``region=eu-west-1``, which replace those of the storage.
    """
    found = _settings(storage) if storage else {}
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    if region := given.get("region"):
        found["region_name"] = region
    if endpoint := given.get("endpoint_override"):
        found["endpoint_url"] = endpoint if "://" in endpoint else f"{given.get('scheme', 'https')}://{endpoint}"
    at = _LIBRARIES.index(library)
    return {names[at]: found[name] for name, names in _SETTINGS.items() if name in found}


def _settings(storage: str) -> dict[str, str]:
    variable = connection_variable(storage, STORAGE_PREFIX)
    if not (text := os.environ.get(variable) or KNOWN.get(variable)):
        raise DataError(
            f'the storage "{storage}" is not known to this process: set the environment variable {variable}'
        )
    found = parse_settings(variable, text)
    if _ROLE in found:
        try:
            keys = _role_keys(tuple(sorted(found.items()))).get_frozen_credentials()
        except ImportError:
            raise MissingExtraError("botocore", "s3") from None
        except Exception as error:  # botocore's exceptions have no common base class
            refused = None if "AccessDenied" in str(error) else refusal(f"s3://{storage}@{found[_ROLE]}", error)
            raise refused or DataAccessError(
                f'the storage "{storage}" cannot assume the role {found[_ROLE]}: {error}'
            ) from None
        found |= dict(zip(_KEYS, keys[:3], strict=True))
    return found


@functools.cache
def _role_keys(settings: tuple[tuple[str, str], ...]) -> Any:
    """Return botocore's object with the keys of a role, which renews them before they expire."""
    from botocore import credentials, exceptions
    from botocore.session import Session

    given, session = dict(settings), Session()
    own = credentials.Credentials(*map(given.get, _KEYS)) if _KEYS[0] in given else session.get_credentials()
    if own is None:
        raise exceptions.NoCredentialsError
    client = functools.partial(session.create_client, region_name=given.get("region_name", "us-east-1"))
    fetcher = credentials.AssumeRoleCredentialFetcher(client, own, given[_ROLE], {"RoleSessionName": "shoal"})
    return credentials.DeferredRefreshableCredentials(fetcher.fetch_credentials, "assume-role")


@functools.lru_cache(maxsize=16)
def s3_filesystem(bucket: str, settings: tuple[tuple[str, str], ...]) -> Any:
    """Return pyarrow's filesystem for a bucket, with the items of `storage_options`."""
    found = dict(settings)
    if endpoint := found.pop("endpoint_override", None):
        scheme, _, host = endpoint.rpartition("://")
        found |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    elif "region" not in found:
        found["region"] = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(**found)


def refusal(path: str, error: object, filesystem: Any = None, folder: str = "") -> DataError | None:
    """Return the error that says why a storage refuses a path; None if the cause is another one.

    Args:
        path: The path, as the user gave it.
        error: Error of a library, with the code of S3 in its text.
        filesystem: Filesystem of pyarrow that is asked again if the error has no code, as after a request for HEAD.
        folder: Folder for this request.
    """
    if _ADDRESS.match(path) is None:
        return None
    name, bare = split_storage(path)
    no_code = re.search(r"in bucket '([^']+)'.*No response body", str(error), re.DOTALL)
    bucket = no_code[1] if no_code else urlsplit(bare).netloc
    if no_code and name and filesystem is None:
        filesystem, folder = s3_filesystem(bucket, tuple(storage_options("pyarrow", name, "").items())), bucket
    if filesystem is not None and filesystem.type_name == "s3" and (no_code or not isinstance(error, OSError)):
        try:
            filesystem.get_file_info(fs.FileSelector(folder))
        except (OSError, pa.ArrowException) as answer:
            error = f"{answer} {error}"
    text = str(error).replace("_", "").lower()
    variable = connection_variable(name or "", STORAGE_PREFIX)
    settings = f'{variable}, the Airflow connection or the Prefect block "{name}"' if name else "the variables AWS_..."
    whose = f'the credentials of the storage "{name}"' if name else "the credentials in the environment"
    for codes, cause, remedy in _REFUSALS:
        if code := next((code for code in codes.split("|") if code.lower() in text), None):
            why = f"{cause.format(whose=whose, bucket=bucket)} ({code}). {remedy} {settings}"
            return (DataAccessError if code in _RETRYABLE else DataError)(f"{path} cannot be read: {why}")
    return None
