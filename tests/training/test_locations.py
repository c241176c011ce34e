"""Where artifacts go: absolute, and tried before a training run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from shoal import RunConfig
from shoal.data.parquet.files import normalise
from shoal.data.staged_data import staged
from shoal.distributors import dispatch
from shoal.distributors.pytorch import PyTorchDistributor
from shoal.errors import InvalidArgumentError
from shoal.jobs import Tracking
from shoal.jobs.files import storage
from shoal.jobs.specs.prediction import PredictJobSpec
from shoal.pool.spec import PoolSpec
from shoal.training import locations

SECRET = "wJalrXUtnFEMI"


def test_a_relative_location_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert RunConfig(artifact_location="models/new").artifact_location == f"{tmp_path}/models/new"
    assert RunConfig(artifact_location="~/models").artifact_location == "/home/somebody/models"
    monkeypatch.setattr(dispatch, "function", lambda request, program: SimpleNamespace(run=lambda: request))
    request: Any = PyTorchDistributor(print).run(artifact_location="models")
    assert request.run_config.artifact_location == f"{tmp_path}/models"


@pytest.mark.parametrize("location", ["/data/models/", "s3://bucket/models/", "file:///data/models"])
def test_an_absolute_location_stays_because_fingerprints_contain_it(location: str) -> None:
    assert RunConfig(artifact_location=location).artifact_location == location


def test_a_file_uri_is_a_path() -> None:
    assert storage.root("file:///data/my%20models/") == "/data/my models"
    with pytest.raises(InvalidArgumentError, match=r'contains the host "relative": write file:///absolute/path'):
        RunConfig(artifact_location="file://relative/models")


@pytest.mark.parametrize("address", ["file://{}", "//{}", "s3:/{}", "http:/{}"])
@pytest.mark.parametrize(
    "authority",
    [
        "me:{}@",
        "me:{}@/x",
        "me:{}@host/x",
        "me:{} {}@host",
        "me:{}/x",
        ":{}@[::1/x",
        "me:{}@exa\u2100mple/x",
        "me:/{}@h",
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda address: RunConfig(artifact_location=address),
        lambda address: PredictJobSpec(
            dataset={"paths": ["/x"]}, model="models:/m/1", input_cols=["a"], output_path=address
        ),
        PoolSpec.parse,
        lambda address: PoolSpec.parse(f"ray://pool?address={quote(address)}"),
    ],
    ids=["artifact_location", "output_path", "pool", "pool_address"],
)
def test_a_refused_address_shows_no_password_whatever_stands_where_its_host_belongs(
    use: Callable[[str], object], address: str, authority: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        use(address.format(authority.replace("{}", SECRET)))
    assert SECRET not in "".join(traceback.format_exception_only(refused.value))


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("//host/x", "//host/x begins with //, as an address without a scheme does: write the scheme"),
        ("s3:/bucket/x", "s3:/bucket/x has only one slash after s3: write s3://"),
    ],
)
def test_an_address_that_would_be_read_as_a_path_is_refused(address: str, says: str) -> None:
    for use in (
        lambda: RunConfig(artifact_location=address),
        lambda: Tracking(uri=address),
        lambda: normalise(address),
        lambda: locations.try_out(address),
        lambda: staged(address).__enter__(),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            use()


@pytest.mark.parametrize("path", ["/data//x", "///data/x", "data/s3:/x", "a:b", "./s3:/x"])
def test_a_path_that_only_looks_odd_is_accepted(path: str) -> None:
    assert RunConfig(artifact_location=path).artifact_location
    assert normalise(path)


def test_a_trial_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    locations.try_out(str(tmp_path / "new" / "models"))
    assert list((tmp_path / "new" / "models").iterdir()) == []
    locations.try_out("memory://trial/models")


@pytest.mark.parametrize("location", ["/etc/passwd", "/etc/passwd/models", "/proc/models", "no-such-scheme://bucket"])
def test_a_location_that_cannot_be_written_to_is_refused(location: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf'artifact_location "{location}" cannot be written to: .*Choose'):
        locations.try_out(location)


@pytest.mark.parametrize("use", [locations.try_out, lambda location: storage.write(f"{location}/x", b"")])
def test_keys_in_a_location_are_neither_in_the_error_nor_in_its_traceback(
    use: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # S3 takes no keys there: the library takes them for a part of the bucket's name, and shows that.
    with pytest.raises(Exception, match="bucket") as refused:
        use(f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/models")
    assert SECRET not in "".join(traceback.format_exception(refused.value))
