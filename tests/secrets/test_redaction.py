"""Credentials go out of every text, whatever they look like; the rest of it stays."""

from __future__ import annotations

import re
import string
import traceback

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shoal.errors import DataError, MissingExtraError, PoolNotFoundError
from shoal.errors import shown as shown_value
from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import (
    has_credentials,
    hiding,
    is_secret_name,
    redact,
    redact_all,
    redact_value,
    redacted_errors,
    secrets_in,
)

CANARY = "cAnArY"
PRINTABLE = "".join(sorted(set(string.printable) - set(string.whitespace)))


def passwords(alphabet: str) -> st.SearchStrategy[str]:
    """Passwords with the canary somewhere in them."""
    return st.builds(lambda a, b: a + CANARY + b, st.text(alphabet, max_size=12), st.text(alphabet, max_size=12))


SCHEMES = st.sampled_from(["http", "HTTPS", "s3", "s3+https", "postgresql+psycopg", "mongodb", "simplecache::s3"])


class TestOneUri:
    @settings(deadline=None)
    @given(SCHEMES, passwords(PRINTABLE + " "), st.sampled_from(["host", "db.example.org:5432", "[::1]:80"]))
    @example("http", f"p/{CANARY}#a?b@c", "host")
    @example("s3", f"12/{CANARY}", "host")
    def test_loses_its_raw_password_and_keeps_host_and_path(self, scheme: str, password: str, host: str) -> None:
        # Host, port and a path with an "@" look just like this, and are much more frequent.
        assume(not (scheme.lower().endswith(("http", "https")) and re.match(r"\d+/", password)))
        uri = f"{scheme}://me:{password}@{host}/data/base"

        assert redact_value(uri) == f"{scheme}://{host}/data/base"
        assert redact_value(f"  {uri}") == f"  {scheme}://{host}/data/base"
        assert password in secrets_in(uri)

    @settings(deadline=None)
    @given(passwords("".join(set(PRINTABLE) - set("&;"))), st.sampled_from(["password", "sig", "X-Amz-Signature"]))
    def test_loses_the_secrets_of_its_query(self, value: str, name: str) -> None:
        shown = redact_value(f"https://host/path?a=1&{name}={value}&b=2")

        assert shown == f"https://host/path?a=1&{name}=***&b=2"

    @settings(deadline=None)
    @given(passwords(string.ascii_letters + string.digits + "-_~."))
    def test_loses_a_token_without_a_password(self, token: str) -> None:
        assert redact_value(f"https://{token}@host/x") == "https://host/x"
        assert redact_value(f"git+https://{token}@host/x") == "git+https://host/x"

    @pytest.mark.parametrize(
        "uri",
        [
            "http://host:5000/a:b@c",
            "http://host:5000/#/experiments/1",
            "https://host/@scope/package",
            "sqlite:////folder/a.db",
            "postgresql+psycopg://me@host/db",
            "abfss://container@account.dfs.core.windows.net/path",
            "s3://bucket/token=7/date=2026-01-01/*.parquet?region=eu-central-1",
            "local://retrain?max_nodes=4",
            "http://[::1",
            "http://host:notaport/x",
            "me@host",
            "/folder/a=b@c",
        ],
    )
    def test_without_credentials_stays_as_it_is(self, uri: str) -> None:
        assert redact_value(uri) == redact(uri) == uri
        assert not has_credentials(uri)
        assert secrets_in(uri) == set()

    def test_hiding_twice_is_hiding_once(self) -> None:
        for uri in ("http://a:b@host/x?token=c", "host=h password='d e'", "Server=h;PWD={f;g};x=1"):
            assert redact_value(redact_value(uri)) == redact_value(uri) != uri


class TestRunningText:
    @settings(deadline=None)
    @given(SCHEMES, passwords("".join(set(PRINTABLE) - set("\"'<>`"))))
    def test_loses_the_passwords_of_its_uris(self, scheme: str, password: str) -> None:
        assume(not (scheme.lower().endswith(("http", "https")) and re.match(r"\d+/", password)))

        shown = redact(f'cannot open "{scheme}://me:{password}@host/x": no such host, ask me@example.org')

        assert shown == f'cannot open "{scheme}://host/x": no such host, ask me@example.org'

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            (f"the store postgresql://me:{CANARY} x@h/db is away", "the store postgresql://h/db is away"),
            (f"host=h password='{CANARY} x' user=me", "host=h password=*** user=me"),
            (f"Driver={{x}};UID=me;PWD={{a;{CANARY}}};x=1", "Driver={x};UID=me;PWD=***;x=1"),
            (f"AccountName=x;AccountKey={CANARY}==;EndpointSuffix=y", "AccountName=x;AccountKey=***;EndpointSuffix=y"),
            (f"jdbc:sqlserver://h;user=me;password={CANARY};db=x", "jdbc:sqlserver://h;user=me;password=***;db=x"),
            (f"{{'password': '{CANARY}', 'n': 1}}", "{'password': '***', 'n': 1}"),
            (f'{{"url":"http://h:80/x","api_key":"{CANARY}"}}', '{"url":"http://h:80/x","api_key":"***"}'),
            (f"Authorization: Bearer {CANARY}", "Authorization: Bearer ***"),
            (f"MLFLOW_TRACKING_PASSWORD={CANARY} train", "MLFLOW_TRACKING_PASSWORD=*** train"),
            ("http://h:80/x, ask me@h.org; pad_token=3, a = b", "http://h:80/x, ask me@h.org; pad_token=3, a = b"),
        ],
    )  # fmt: skip
    def test_loses_its_secrets(self, text: str, shown: str) -> None:
        assert redact(text) == shown

    @settings(deadline=None)
    @given(st.text())
    def test_any_text_can_be_read(self, text: str) -> None:
        assert redact(redact(text)) == redact(text)
        redact_value(text)
        secrets_in(text)


def test_names_of_secrets() -> None:
    secret = ["password", "DB_PASSWORD", "api_key", "aws_secret_access_key", "hf_token", "token", "clientSecret"]
    assert [name for name in secret if not is_secret_name(name)] == []
    plain = ["pad_token", "max_tokens", "key", "objective", "tokenizer", "passes", "monotone_constraints"]
    assert [name for name in plain if is_secret_name(name)] == []


def test_no_error_of_shoals_shows_credentials() -> None:
    error = DataError(f"s3://me:{CANARY}/x@bucket/y cannot be listed")

    assert str(error) == "s3://bucket/y cannot be listed"
    assert CANARY not in repr(error)
    assert str(PoolNotFoundError("x", [])).startswith('pool "x" does not exist')
    assert MissingExtraError("mlflow", "mlflow").extra == "mlflow"


def test_no_error_shows_a_known_secret_even_where_it_is_cut_off() -> None:
    lines = [f"{CANARY}{number}{'x' * 30}" for number in range(3)]
    with hiding(KnownSecrets(["\n".join(lines)]).hide):
        error = DataError(f"rank 0 failed: KeyError: {lines!r}")
        error.add_note(f"Traceback: {lines[1]}")
        cut = shown_value({"a" * 60: lines[0]})
        document = redact_all({lines[0]: [lines[1], 3]})

    assert CANARY not in str([error, error.__notes__, cut, document])
    assert str(error) == "rank 0 failed: KeyError: ['***', '***', '***']"
    assert document == {"***": ["***", 3]}
    assert redact(lines[0]) == lines[0]


def test_no_error_of_a_file_system_shows_the_credentials_of_its_uri() -> None:
    with pytest.raises(FileNotFoundError) as caught, redacted_errors(f"s3://me:{CANARY}@bucket/y"):
        raise FileNotFoundError(2, "is not there", f"me:{CANARY}@bucket/y") from ValueError(CANARY)
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert "***@bucket/y" in str(caught.value)


def test_a_secret_entry_without_an_end_is_looked_at_once() -> None:
    text = '"token": "' + "\\" * 2000  # with two readings of each backslash this would never end
    assert redact(text) == text


def test_a_long_word_of_uris_is_hidden_as_a_whole() -> None:
    word = "http://a:" * 10_000  # each may begin credentials that end with the word
    assert redact(f"before {word} after http://me:{CANARY}@host/x") == "before *** after http://host/x"
