from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from shoal.data.connections import CONNECTION_PREFIX
from shoal.errors import InvalidArgumentError
from shoal.jobs import credentials
from shoal.jobs.credentials import Secrets
from shoal.secrets.redaction import redact_value
from shoal.state import home


def test_only_what_the_driver_needs_is_taken_from_the_environment():
    environment = {
        "MLFLOW_TRACKING_PASSWORD": "p",
        "MLFLOW_TRACKING_URI": "http://x",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AZURE_STORAGE_KEY": "z",
        "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
        "AIRFLOW__CORE__FERNET_KEY": "no",
        "DATABASE_PASSWORD": "no",
        "AWS_EMPTY": "",
    }

    taken = credentials.from_environment(environment)

    assert sorted(taken) == [
        "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "MLFLOW_TRACKING_PASSWORD",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:pa%40ss@host:5000/x", "http://host:5000/x"),
        ("http://me:p/a#s?s@host:5000/x", "http://host:5000/x"),
        (" https://TOKEN@host/x", " https://host/x"),
        ("postgresql://db/mlflow?password=X", "postgresql://db/mlflow?password=***"),
        ("https://acc.blob.core.windows.net/c?sv=1&sig=X", "https://acc.blob.core.windows.net/c?sv=1&sig=***"),
        ("postgresql+psycopg://me:secret@db/mlflow", "postgresql+psycopg://db/mlflow"),
        ("s3://KEY:SECRET@bucket/path", "s3://bucket/path"),
        ("http://host:5000/a:b@c", "http://host:5000/a:b@c"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("me@host", "me@host"),
    ],
)
def test_a_uri_loses_its_credentials(uri, shown):
    assert redact_value(uri) == shown


def test_two_connections_with_one_variable_are_refused():
    urls = {"dwh-eu": "postgresql://eu/x", "dwh.eu": "postgresql://other/x"}
    assert credentials.connections([(CONNECTION_PREFIX, "dwh-eu")] * 2, {}, urls.get) == {
        "SHOAL_CONNECTION_DWH_EU": "postgresql://eu/x"
    }

    said = (
        'the connections "dwh-eu" and "dwh.eu" of the spec take their URL from the same environment variable, '
        "SHOAL_CONNECTION_DWH_EU: rename one of the connections"
    )
    with pytest.raises(InvalidArgumentError, match=said):
        credentials.connections([(CONNECTION_PREFIX, name) for name in urls], {}, urls.get)


def test_hiding_and_revealing_a_document():
    document = {"tracking": {"uri": "http://a:b@host"}, "eval": [{"paths": ["/x", "s3://k:s@bucket"]}], "n": 1}

    hidden, uris = credentials.hide(document)

    assert hidden == {"tracking": {"uri": "http://host"}, "eval": [{"paths": ["/x", "s3://bucket"]}], "n": 1}
    assert credentials.reveal(hidden, uris) == document


def test_places_with_slashes_in_their_names_are_told_apart():
    one, other = "http://a:one@host", "http://a:other@host"
    document = {"kwargs": {"a/b": one, "a": {"b": other}, "a~1b": f"{one}/x"}}

    hidden, uris = credentials.hide(document)

    assert sorted(uris) == ["/kwargs/a/b", "/kwargs/a~01b", "/kwargs/a~1b"]
    assert credentials.reveal(hidden, uris) == document


def test_values_with_a_secret_name_are_hidden():
    document = {"kwargs": {"db": {"password": "hunter22", "user": "me"}, "api_key": "", "pad_token": "<pad>"}}

    hidden, found = credentials.hide(document)

    assert hidden == {"kwargs": {"db": {"password": "***", "user": "me"}, "api_key": "", "pad_token": "<pad>"}}
    assert credentials.reveal(hidden, found) == document
    assert Secrets(uris=found).redact("connected with hunter22") == "connected with ***"


def test_a_name_with_credentials_is_refused():
    with pytest.raises(InvalidArgumentError, match="credentials") as caught:
        credentials.hide({"eval_set": {"http://me:hunter22@host": 1}})

    assert "hunter22" not in str(caught.value)


def test_the_file_is_for_its_owner_alone_and_read_once(fresh_home: Path):
    secrets = Secrets({"AWS_SECRET_ACCESS_KEY": "s"}, {"/tracking/uri": "http://a:b@host"})

    credentials.hand_over("job-1", secrets)

    [file] = (home() / "credentials").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert credentials.take("job-1") == secrets
    assert not file.exists()
    assert credentials.take("job-1") == Secrets()


def test_of_two_that_submit_the_same_attempt_the_first_ones_file_stays(fresh_home: Path):
    first, second = Secrets({"AWS_SECRET_ACCESS_KEY": "first"}), Secrets({"AWS_SECRET_ACCESS_KEY": "second"})

    credentials.hand_over("job-1", first)
    credentials.hand_over("job-1", second)

    assert len(list((home() / "credentials").iterdir())) == 1
    assert credentials.take("job-1") == first


def test_nothing_to_say_leaves_no_file(fresh_home: Path):
    credentials.hand_over("job-1", Secrets())

    assert not (home() / "credentials").exists() or not any((home() / "credentials").iterdir())


def test_no_secret_is_printed():
    secrets = Secrets(
        {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_REGION": "eu-central-1", "AWS_SESSION_TOKEN": "abc"},
        {"/tracking/uri": "http://me:hunter22@host/x"},
    )

    said = secrets.redact("wJalrXUtnFEMI at http://me:hunter22@host/x with hunter22 in eu-central-1, alphabc")

    assert said == "*** at http://host/x with *** in eu-central-1, alphabc"
    assert "hunter22" not in repr(secrets)
    assert "wJalr" not in repr(secrets)


@pytest.mark.parametrize(
    "shown", [str, repr, json.dumps, lambda text: str(KeyError(text)), lambda text: quote(text, "")]
)
def test_no_line_of_a_secret_is_printed_in_any_form(shown: Callable[[str], str]):
    lines = ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", "AoGBAJ7secretline2zzzzzzzzz+zzzz"]
    pem = "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""])
    secrets = Secrets({"TLS_PEM": pem}, named=frozenset(["TLS_PEM"]))

    said = secrets.redact(f"cannot use {shown(pem)}, nor {lines[1]}")

    assert "MIIEvQIBAD" not in said
    assert "secretline2" not in said
    assert said.endswith(", nor ***")


@pytest.mark.parametrize(
    ("error", "waited_s", "hinted"),
    [
        ("An error occurred (ExpiredToken) when calling GetObject", 7200.0, True),
        ("s3://b/x: Access Denied", 901.0, True),
        ("API request failed with error code 403", 7200.0, True),
        ("password authentication failed for user me", 7200.0, True),
        ("s3://b/x: Access Denied", 60.0, False),
        ('the dataset lacks the column "delay"', 7200.0, False),
    ],
)
def test_a_job_that_waited_long_says_that_its_credentials_may_have_expired(error, waited_s, hinted):
    hint = credentials.expiry_hint(error, waited_s)
    assert ("may have expired in this time: submit the job again" in hint) is hinted
