"""A secret goes out of a text in every form in which a program prints it, and in whatever chunks the text arrives."""

from __future__ import annotations

import base64
import itertools
import json
import string
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.secrets.known_secrets import KnownSecrets, SecretStream

BASE64 = string.ascii_letters + string.digits + "+/"
LINES = st.lists(st.text(BASE64, min_size=16, max_size=70), min_size=1, max_size=4)
ODD = st.text(string.ascii_letters + "'\"\\%&<é€ \t", min_size=12, max_size=30).filter(
    lambda text: text == text.strip()
)

FORMS: list[Callable[[str], str]] = [
    str,
    repr,
    ascii,
    lambda text: repr(text.encode()),
    lambda text: str({"v": text}),
    json.dumps,
    lambda text: json.dumps([text], ensure_ascii=False),
    lambda text: json.dumps(json.dumps(text)),
    lambda text: json.dumps(repr([text])),
    lambda text: str(KeyError(repr(text))),
    lambda text: quote(text, safe=""),
    quote,
    quote_plus,
    lambda text: quote(text, safe="").replace("%2B", "%2b").replace("%2F", "%2f").replace("%0A", "%0a"),
    lambda text: base64.b64encode(text.encode()).decode(),
    lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    lambda text: base64.encodebytes(text.encode()).decode(),
    lambda text: text.encode().hex(),
    lambda text: "\n".join(f"log: {line}" for line in text.splitlines()),
]


def pem(lines: list[str]) -> str:
    return "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""])


SECRETS = st.one_of(
    LINES.map(pem),
    LINES.map(lambda lines: json.dumps({"type": "x", "private_key": pem(lines)})),
    LINES.map(lambda lines: json.dumps({"type": "x", "private_key": pem(lines)}, indent=2)),
    LINES.map("\r\n".join),
    ODD,
    st.tuples(ODD, ODD).map("\n".join),
)


def shown_in_chunks(secrets: KnownSecrets, text: str, cuts: list[int]) -> str:
    stream, longest = SecretStream(secrets), secrets._longest
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    out = ""
    for start, end in itertools.pairwise(edges):
        out += stream.feed(text[start:end])
        assert len(stream._held) < max(longest, 1)
    return out + stream.end()


def windows(text: str, size: int = 9) -> set[str]:
    return {text[start : start + size] for start in range(len(text) - size + 1)}


class TestForms:
    @settings(deadline=None, max_examples=200)
    @given(SECRETS, st.sampled_from(FORMS), st.lists(st.integers(0, 10_000), max_size=8))
    def test_each_is_hidden_in_any_chunks(self, secret: str, form: Callable[[str], str], cuts: list[int]) -> None:
        secrets, printed = KnownSecrets([secret]), form(secret)
        text = f"before {printed}\nafter"

        shown = shown_in_chunks(secrets, text, cuts)

        assert shown == secrets.hide(text)
        assert shown.startswith("before ") and shown.endswith("after")
        visible = set().union(*(windows(line) for line in shown.splitlines()))
        armour = windows("-----BEGIN PRIVATE KEY-----") | windows("-----END PRIVATE KEY-----")
        assert visible & windows(printed) - armour == set()

    @settings(deadline=None)
    @given(LINES, st.binary(max_size=5), st.binary(max_size=5))
    def test_base64_of_a_longer_text_hides_the_secret_at_each_offset(
        self, lines: list[str], before: bytes, after: bytes
    ) -> None:
        secret = pem(lines)
        encoded = base64.b64encode(before + secret.encode() + after).decode()
        first, last = -(-len(before) * 4 // 3) + 1, (len(before) + len(secret)) * 4 // 3 - 3

        shown = KnownSecrets([secret]).hide(encoded)

        assert windows(encoded[first:last], 12) & windows(shown, 12) == set()

    @pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
    def test_a_secret_that_is_given_in_base64_is_hidden_when_it_is_decoded(
        self, encode: Callable[[bytes], bytes]
    ) -> None:
        document = json.dumps({"type": "x", "private_key": pem(["MIIEvQIBADANsecretline", "AoGBAJ7secretline22"])})
        secrets = KnownSecrets([encode(document.encode()).decode()])

        assert secrets.hide("the key AoGBAJ7secretline22") == "the key ***"
        assert secrets.hide(document) == "***"

    def test_a_secret_with_escaped_line_breaks_is_hidden_by_its_lines(self) -> None:
        secrets = KnownSecrets([pem(["MIIEvQIBADANsecretline", "AoGBAJ7secretline22"]).replace("\n", "\\n")])

        assert secrets.hide("a AoGBAJ7secretline22 b") == "a *** b"


class TestParts:
    def test_of_json_are_long_texts_and_values_of_secret_keys(self) -> None:
        key = {
            "project": "retrain",
            "ok": True,
            "n": 5,
            "password": "hunter2",
            "auth": {"api_key": [12345678]},
            "id": "0123456789ab",
        }
        secrets = KnownSecrets([json.dumps(key)])

        assert secrets.hide("retrain True 5 hunter2 12345678 0123456789ab") == "retrain True 5 *** *** ***"

    def test_of_settings_are_their_passwords(self) -> None:
        secrets = KnownSecrets(["user=me\npassword=hunter22\npostgresql://me:wJalrXUt@db/x"])

        assert secrets.hide("hunter22, wJalrXUt, user") == "***, ***, user"

    def test_are_not_the_first_and_last_line_of_a_pem_file(self) -> None:
        secrets = KnownSecrets([pem(["MIIEvQIBADANsecretline"])])

        assert secrets.hide("-----BEGIN PRIVATE KEY-----\nother") == "-----BEGIN PRIVATE KEY-----\nother"

    @pytest.mark.parametrize("secret", ["", "abc", "a\nb\nc", "[" * 100_000, '{"a": ', "\n" * 50, "%zz%", "\ud800" * 9])
    def test_of_odd_values_can_be_found(self, secret: str) -> None:
        assert KnownSecrets([secret, "hunter22"]).hide("the hunter22") == "the ***"


class TestStream:
    @settings(deadline=None, max_examples=300)
    @given(
        st.lists(st.text("ab\n", min_size=6, max_size=12), max_size=3),
        st.text("ab\n", max_size=60),
        st.lists(st.integers(0, 100), max_size=10),
    )
    def test_hides_overlapping_secrets_as_in_the_whole_text(
        self, secrets: list[str], text: str, cuts: list[int]
    ) -> None:
        known = KnownSecrets(secrets)

        assert shown_in_chunks(known, f"{text}.", cuts) == known.hide(f"{text}.")

    def test_holds_nothing_back_that_begins_no_secret(self) -> None:
        stream = SecretStream(KnownSecrets(["hunter22"]))

        assert stream.feed("loss 0.1") == "loss 0.1"
        assert stream.feed("5, the hun") == "5, the "
        assert stream.feed("dred") == "hundred"
        assert stream.feed(" hunte") == " "
        assert stream.feed("r22") == "***"

    def test_hides_a_secret_that_is_cut_off_at_the_end(self) -> None:
        stream = SecretStream(KnownSecrets(["hunter22"]))

        assert stream.feed("the hunter2") + stream.end() == "the ***"
        assert stream.feed("a hunt") + stream.end() == "a hunt"
