"""Tables on an S3 server, read with the settings of a storage that a path names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.credentials import AssumeRoleCredentialFetcher, RefreshableCredentials
from botocore.exceptions import ClientError
from deltalake import write_deltalake
from pydantic import ValidationError
from pyiceberg.catalog import load_catalog

from shoal.data import DataConnector
from shoal.data.connections import KNOWN, in_storage, parse_settings, storage_options
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import DataAccessError, DataError, InvalidArgumentError
from shoal.secrets.redaction import redact
from tests.support.s3_server import EXPIRED, s3_server, upload

ROWS = pa.table({"id": range(1000), "y": [index / 8 for index in range(1000)]})
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Settings of a storage with the bucket `air`, which has the same rows in three formats. The setting `uri` is that
    of the Iceberg table's catalog."""
    folder = tmp_path_factory.mktemp("air")
    (folder / "parquet").mkdir()
    pq.write_table(ROWS, folder / "parquet" / "a.parquet")
    write_deltalake(folder / "delta", ROWS)
    with s3_server() as settings:
        upload(settings, folder, "air")
        uri = f"sqlite:///{folder}/catalog.db"
        keys = {"s3.access-key-id": settings["aws_access_key_id"], "s3.endpoint": settings["endpoint_url"]}
        keys |= {"s3.secret-access-key": settings["aws_secret_access_key"], "s3.region": "us-east-1"}
        catalog = load_catalog("prod", type="sql", uri=uri, warehouse="s3://air", **keys)
        catalog.create_namespace("db")
        catalog.create_table("db.flights", ROWS.schema, location="s3://air/iceberg").append(ROWS)
        yield {**settings, "uri": uri}


@pytest.fixture
def storage(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that sets the settings of the storage `lake`."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3["endpoint_url"])
    monkeypatch.setenv("SHOAL_CATALOG_PROD", json.dumps({"type": "sql", "uri": s3["uri"]}))
    own = {name: value for name, value in s3.items() if name not in ("role_arn", "uri")}

    def storage(**changed: str) -> None:
        monkeypatch.setenv("SHOAL_STORAGE_LAKE", json.dumps({**own, **changed}))

    storage()
    return storage


def tables() -> Iterator[DataConnector]:
    """The same rows in all formats, and from a catalog."""
    yield DataConnector.from_parquet("s3://air/parquet", storage="lake", filters=[("id", ">=", 0)])
    yield DataConnector.from_delta("s3://lake@air/delta")
    yield DataConnector.from_iceberg("s3://air/iceberg", storage="lake")
    yield DataConnector.from_iceberg("db.flights", catalog="prod", storage="lake")


@pytest.mark.server
@pytest.mark.parametrize("has_role", [False, True], ids=["keys", "role"])
def test_all_formats_on_s3_have_the_digest_of_local_files(
    s3: dict[str, str], storage: Any, has_role: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage(**({"role_arn": s3["role_arn"]} if has_role else {}))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-keys")
    if has_role:
        # A storage without keys: those of the process assume the role.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["aws_access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["aws_secret_access_key"])
        monkeypatch.delenv("AWS_SESSION_TOKEN")
        storage(role_arn=s3["role_arn"], aws_access_key_id="", aws_secret_access_key="")
    pq.write_table(ROWS, tmp_path / "a.parquet")
    digest = DataConnector.from_parquet(tmp_path, filters=[("id", ">=", 0)]).digest()
    for table in tables():
        spec = DatasetSpec.model_validate_json(table.to_spec().model_dump_json())
        assert spec.paths[0].partition("://")[2].startswith("lake@") and spec.storage is None
        assert DataConnector.from_spec(spec).digest() == digest
        assert DataConnector.from_spec(spec).to_arrow().num_rows == 1000


@pytest.mark.server
@pytest.mark.parametrize(
    ("changed", "said", "kind"),
    [
        ({"aws_access_key_id": "AKIAUNKNOWN"}, "are wrong (InvalidAccessKeyId). Correct SHOAL_STORAGE_LAKE", DataError),
        ({"aws_secret_access_key": SECRET}, "are wrong (SignatureDoesNotMatch). Correct SHOAL_STORAGE", DataError),
        ({"aws_session_token": EXPIRED}, "have expired (ExpiredToken). Name a role as role_arn", DataAccessError),
    ],
)
def test_refused_credentials_are_one_sentence(storage: Any, changed: Any, said: str, kind: type) -> None:
    storage(**changed)
    for table in tables():
        with pytest.raises(DataError) as caught:
            table.num_rows()
        assert f'cannot be read: the credentials of the storage "lake" {said}' in str(caught.value)
        assert type(caught.value) is kind and SECRET not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.server
def test_a_bucket_or_a_storage_that_does_not_exist(storage: Any) -> None:
    for connect in (DataConnector.from_parquet, DataConnector.from_delta, DataConnector.from_iceberg):
        with pytest.raises(DataError, match=r"there is no bucket sea \(NoSuchBucket\). Correct the path") as caught:
            connect("s3://lake@sea/table").num_rows()
        assert caught.value.permanent
        with pytest.raises(DataError, match=r'the storage "sea" is not known to this process: .* SHOAL_STORAGE_SEA'):
            connect("s3://sea@air/table").num_rows()
    with pytest.raises(DataError, match="no bucket sea"):
        DataConnector.from_parquet("s3://lake@sea/*/x.parquet").num_rows()
    with pytest.raises(DataError, match="s3://lake@air/nothing does not exist"):
        DataConnector.from_parquet("s3://lake@air/nothing").num_rows()


@pytest.mark.server
def test_keys_of_a_role_are_renewed(s3: dict[str, str], storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # botocore renews keys that expire soon: here, within two hours.
    monkeypatch.setattr(RefreshableCredentials, "_advisory_refresh_timeout", 7200)
    monkeypatch.setattr(AssumeRoleCredentialFetcher, "DEFAULT_EXPIRY_WINDOW_SECONDS", 7200)
    storage(role_arn=s3["role_arn"], region_name="eu-west-1")
    first, second = (storage_options("pyarrow", "lake", "")["access_key"] for _ in range(2))
    assert len({s3["aws_access_key_id"], first, second}) == 3
    assert DataConnector.from_parquet("s3://lake@air/parquet").num_rows() == 1000


@pytest.mark.server
def test_a_catalog_may_repeat_settings_and_be_found_elsewhere(
    s3: dict[str, str], storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = {"type": "sql", "uri": s3["uri"], "s3.region": "eu-west-1", "s3.endpoint": "http://127.0.0.1:9"}
    monkeypatch.delenv("SHOAL_CATALOG_PROD")
    monkeypatch.setitem(KNOWN, "SHOAL_CATALOG_PROD", json.dumps(properties))
    assert DataConnector.from_iceberg("db.flights", catalog="prod", storage="lake").num_rows() == 1000


def test_a_role_needs_keys_that_may_assume_it(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    storage(role_arn="arn:aws:iam::1:role/x", aws_access_key_id="", aws_secret_access_key="")
    with pytest.raises(DataError, match="cannot assume the role arn:aws:iam::1:role/x: Unable to locate credentials"):
        DataConnector.from_parquet("s3://lake@air/parquet").num_rows()
    storage(role_arn="arn:aws:iam::1:role/y")
    denied = ClientError({"Error": {"Code": "AccessDenied", "Message": "not authorized"}}, "AssumeRole")
    monkeypatch.setattr(AssumeRoleCredentialFetcher, "fetch_credentials", Mock(side_effect=denied))
    with pytest.raises(DataAccessError, match=r"cannot assume the role .*AssumeRole operation: not authorized"):
        storage_options("pyarrow", "lake", "")


@pytest.mark.server
def test_a_role_that_may_not_be_assumed_is_named(s3: dict[str, str], storage: Any) -> None:
    storage(role_arn=s3["role_arn"], aws_secret_access_key=SECRET)
    with pytest.raises(DataError, match=r'role/reader cannot be read: the credentials of the storage "lake" are wrong'):
        DataConnector.from_parquet("s3://lake@air/parquet").num_rows()


@pytest.mark.parametrize(
    "user", ["AKIAIOSFODNN7EXAMPLE", "a1" * 20, "ghp_" + "a1" * 18, "lake:word", "AKIAIOSFODNN7EXAMPLE:a/b"]
)
def test_keys_in_a_path_are_no_name(user: str) -> None:
    path = f"s3://{user}@b/k"
    assert redact(f"see {path} there") == "see s3://b/k there"
    with pytest.raises(InvalidArgumentError, match="the path s3://b/k contains credentials"):
        DataConnector.from_parquet(path)


def test_a_name_is_a_part_of_the_path() -> None:
    spec = DatasetSpec.model_validate({"paths": ["s3://air/a", "s3://lake@air/b"], "storage": "lake"})
    assert spec.paths == ("s3://lake@air/a", "s3://lake@air/b") and "storage" not in spec.model_dump()
    assert redact(spec.paths[0]) == spec.paths[0]
    for name, paths in (("lake", ["/data"]), ("lake", ["s3://sea@air/a"]), ("AKIAIOSFODNN7EXAMPLE", ["s3://air/a"])):
        with pytest.raises(ValidationError, match="does not fit the path") as caught:
            DatasetSpec.model_validate({"paths": paths, "storage": name})
        assert "AKIA" not in str(caught.value)
    for wrong in ({"paths": [3]}, {"sql": "SELECT 1", "connection": "w"}):
        with pytest.raises(ValidationError, match=r"does not fit the path 3|together with paths or storage"):
            DatasetSpec.model_validate({**wrong, "storage": "lake"})
    with pytest.raises(InvalidArgumentError, match="staging_location s3://lake@air/x names a storage"):
        DataConnector.from_dataframe(ROWS, staging_location="s3://lake@air/x")
    assert in_storage("lake", "iceberg://prod/db.flights") == "iceberg://lake@prod/db.flights"


def test_settings_are_json_or_a_uri() -> None:
    keys = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "a/b"}
    uri = "aws://AKIA:a%2Fb@/?region_name=eu-west-1&endpoint_url=http%3A%2F%2Fs3%3A9000"
    expected = {**keys, "region_name": "eu-west-1", "endpoint_url": "http://s3:9000"}
    assert parse_settings("SHOAL_STORAGE_X", uri) == parse_settings("SHOAL_STORAGE_X", json.dumps(expected)) == expected
    assert parse_settings("SHOAL_CATALOG_X", "https://rest") == {"uri": "https://rest"}
    for text, said in (
        ('{"aws_access_key_id": ', "neither JSON nor a URI"),
        ('{"verify": false}', "the unknown settings verify"),
        ("aws://AKIA@/", "only one of two keys"),
        # With a part of the secret lost, the keys of the process would be used.
        ("aws://AKIA:a/b@/?region_name=eu-west-1", "without a host"),
        ("aws://AKIA:a?b@/?region_name=eu-west-1", "without a host"),
        ("postgresql://me:word@db/x", "without a host"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"SHOAL_STORAGE_X, .* has a? ?.*{said}"):
            parse_settings("SHOAL_STORAGE_X", text)
