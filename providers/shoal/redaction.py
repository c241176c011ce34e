"""Take credentials out of text: whatever shoal stores, returns, logs or raises goes through here.

Credentials are the user and password of a URI, parameters and settings with a secret name (``?sig=``, ``password=``,
``PWD=``, ``"api_key": "…"``) and what an ``Authorization`` header carries. A well-formed URI is read as RFC 3986 says.
Where a password was not percent-encoded (``/ # ? @``) everything up to the last ``@`` is taken for it: more may be
hidden than necessary, never less.

One form cannot be told from a host and port: an http URI whose raw password is a number followed by ``/``
(``http://me:12/34@host``). No client can log in with it either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*$")
_SCHEME_LENGTH = 40
"""Characters looked at in front of ``://``: registered schemes are shorter."""
_URI = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.:-]*://[^\r\n]*\Z")
"""A text that is one URI from its beginning to its end; a raw password may contain blanks."""

_AUTHORITY = re.compile(r"[^/?#]*")
_WORD = re.compile(r"[^\s\"'<>`]*")
_PASSWORD_REACH = 256
"""In running text, how far behind ``user:`` an ``@`` is looked for when the password has a blank or a quote in it."""

_HTTP = frozenset({"http", "https", "ws", "wss", "hdfs", "webhdfs", "mlflow-artifacts", "ray", "grpc", "tcp"})
"""Schemes with ``host:port/path``, whose path may contain an ``@``."""
_STORAGE = {
    "abfs",
    "abfss",
    "wasb",
    "wasbs",
    "az",
    "adl",
    "ssh",
    "sftp",
    "scp",
    "ftp",
    "ftps",
    "hdfs",
    "webhdfs",
    "smb",
}
_DATABASES = {
    *("postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle", "sqlite", "redshift", "snowflake"),
    *("clickhouse", "trino", "presto", "hive", "cockroachdb", "db2", "mongodb", "databricks"),
}
_USER_IS_NO_SECRET = frozenset(_STORAGE | _DATABASES)
"""Schemes in which a user without a password is a name (of an Azure container, of a database's user), and no token."""

_SCHEMES = "|".join(map(re.escape, sorted(_HTTP | _STORAGE | _DATABASES | {"file", "s3", "s3a", "gs", "gcs"})))
_FEW_SLASHES = re.compile(
    rf"(?:(?<![:\w/])//|\b(?:{_SCHEMES}):/?(?!/))(?P<user>[^/?#@\s\"':]*:(?P<value>[^@\s\"'<>]+)@)", re.IGNORECASE
)
"""A URI without its scheme, or with fewer than two slashes: as mistyped, or as a path with its slashes made one."""

_STRONG = (
    r"(?:[\w.-]*[_.-])?(?:"
    r"(?:ssl)?pass(?:word|wd|phrase)|pwd|secret|"
    r"(?:secret|private|api|account|(?:shared[_.-]?)?access|storage|service)[_.-]?key|secret[_.-]?access[_.-]?key|"
    r"shared[_.-]?access[_.-]?signature|connection[_.-]?string|sas[_.-]?token|"
    r"(?:auth|access|api|bearer|session|security|refresh|hf|github|gitlab)[_.-]?token"
    r")|(?:client|app|shared)secret|credentials?|token|authorization"
)
"""Names of secrets wherever they stand. Not ``pad_token`` and the like, which are parameters of language models."""
_WEAK = (
    rf"{_STRONG}|[\w.-]*(?:token|password|secret|signature|credentials?|access_?key(?:_?id)?|accessid)|"
    "sig|sas|pass|key|code|auth|jwt|odbc_connect"
)
"""Names of secrets in the query of a URI."""

_SECRET_NAME = re.compile(_STRONG, re.IGNORECASE)
_QUERY_WORD = re.compile(
    rf"(?<=[?&;#])(?P<name>{_WEAK})=(?P<value>[^&;\s\"'<>`]+(?:[&;](?![^&;=\s]*=)[^&;\s\"'<>`]*)*)", re.IGNORECASE
)
_QUERY_ALL = re.compile(rf"(?<=[?&;#])(?P<name>{_WEAK})=(?P<value>[^&;]+(?:[&;](?![^&;=]*=)[^&;]*)*)", re.IGNORECASE)
_SETTING = re.compile(
    rf"(?<![\w./-])(?P<name>{_STRONG})\s*=\s*(?!=)"
    r"(?P<value>'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\{[^}]*\}|(?:[^\s&;\"']|[\"'](?![\s,}\])]|\Z))+)",
    re.IGNORECASE,
)
_ENTRY = re.compile(
    rf"(?P<quote>[\"'])(?:{_STRONG})(?P=quote)\s*:\s*(?P<mark>[\"'])(?P<value>(?:\\.|(?!(?P=mark))[^\\])+)(?P=mark)",
    re.IGNORECASE | re.DOTALL,
)
_HEADER = re.compile(
    r"authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?(?P<value>[^\s\"']+)", re.IGNORECASE
)


_LONG_WORD = re.compile(r"[^\s\"'<>`]{4096,}")
_MOST_STEPS = 20_000_000
"""Each colon of a word may begin credentials that reach to the word's end. Where looking for all of them would take
more steps than this (colons times length), about half a second, the whole word is hidden."""


class _Span(NamedTuple):
    """A part of a text to be replaced."""

    start: int
    end: int
    replacement: str
    secret: str


def redact(text: str) -> str:
    """Take the credentials out of a text; a text without any is returned as it is."""
    return _replaced(text, _spans(text, whole=False))


def redact_value(value: str) -> str:
    """Take the credentials out of a field's value, which may be one URI from beginning to end."""
    return _replaced(value, _spans(value, whole=_URI.match(value) is not None))


def has_credentials(value: str) -> bool:
    """Whether :func:`redact_value` would change a value."""
    return redact_value(value) != value


def secrets_in(value: str) -> set[str]:
    """The passwords, tokens and signatures in a field's value, as they stand there and percent-decoded and encoded."""
    found = {
        secret
        for span in _spans(value, whole=_URI.match(value) is not None)
        for secret in (span.secret, unquote(span.secret), quote(unquote(span.secret), safe=""))
    }
    return found - {""}


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret, such as ``password`` or ``api_key``."""
    return _SECRET_NAME.fullmatch(name) is not None


@contextmanager
def redacted_errors(uri: str) -> Iterator[None]:
    """Take the credentials of a URI out of an error that leaves the block, and hide its causes, which may have them."""

    def shown(part: object) -> object:
        if not isinstance(part, str):
            return part
        for secret in secrets_in(uri):  # a filesystem names paths without their scheme
            part = part.replace(secret, HIDDEN)
        return redact_value(part)

    try:
        yield
    except Exception as error:  # every filesystem has exceptions of its own
        if not has_credentials(uri):
            raise
        error.args = tuple(map(shown, error.args))
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = shown(error.filename)
        raise error from None


class RedactedRepr:
    """Mixin: `repr` and `str` of an object, without credentials. It goes before the base that makes them."""

    def __repr__(self) -> str:
        return redact(super().__repr__())

    def __str__(self) -> str:
        return redact(super().__str__())


def redact_all(document: Any) -> Any:
    """A JSON document without the credentials in its values, and without the values that have a secret name."""
    if isinstance(document, dict):
        return {
            key: HIDDEN if isinstance(item, str) and item and is_secret_name(key) else redact_all(item)
            for key, item in document.items()
        }
    if isinstance(document, list | tuple):
        return [redact_all(item) for item in document]
    return redact_value(document) if isinstance(document, str) else document


def _replaced(text: str, spans: list[_Span]) -> str:
    parts, at = [], 0
    for span in spans:
        if span.start < at:  # inside the one before
            at = max(at, span.end)
            continue
        parts += [text[at : span.start], span.replacement]
        at = span.end
    return "".join([*parts, text[at:]])


def _spans(text: str, *, whole: bool) -> list[_Span]:
    if "=" not in text and ":" not in text:
        return []
    dense = [match for match in _LONG_WORD.finditer(text) if match[0].count(":") * len(match[0]) > _MOST_STEPS]
    for match in dense:
        text = text[: match.start()] + " " * len(match[0]) + text[match.end() :]
    named = (_QUERY_ALL if whole else _QUERY_WORD, _SETTING, _ENTRY, _HEADER)
    values = (match for pattern in named for match in pattern.finditer(text) if match["value"] != HIDDEN)
    found = [
        *(_Span(*match.span(), HIDDEN, match[0]) for match in dense),
        *_users(text, whole=whole),
        *(_Span(*match.span("user"), "", match["value"]) for match in _FEW_SLASHES.finditer(text)),
        *(_Span(*match.span("value"), HIDDEN, match["value"].strip("'\"{}")) for match in values),
    ]
    return sorted(found, key=lambda span: (span.start, -span.end))


def _users(text: str, *, whole: bool) -> Iterator[_Span]:
    """User and password of each URI in a text."""
    at = text.find("://")
    while at >= 0:
        start = at + 3
        if scheme := _SCHEME.search(text[max(0, at - _SCHEME_LENGTH) : at]):
            rest = text[start:] if whole else _reach(text, start)
            end = _user_length(scheme[0].lower(), rest)
            if end:
                user, colon, password = rest[: end - 1].partition(":")
                yield _Span(start, start + end, "", password if colon else user)
        at = text.find("://", start)


def _reach(text: str, start: int) -> str:
    """What may belong to a URI in running text: a word, or more where a raw password seems to go on behind it."""
    match = _WORD.match(text, start)
    word = match[0] if match else ""
    authority = _authority(word)
    if "@" in word or ":" not in authority or _is_host_and_port(authority):
        return word
    ahead = text[start : start + _PASSWORD_REACH].split("\n", 1)[0].split("://", 1)[0]
    behind = ahead.find("@") + 1
    more = _WORD.match(text, start + behind) if behind else None
    return ahead[:behind] + more[0] if more else word


def _user_length(scheme: str, rest: str) -> int:
    """Length of ``user:password@`` at the start of what follows ``://``; 0 where there is no secret in it."""
    authority = _authority(rest)
    user, at, _ = authority.rpartition("@")
    kinds = scheme.split("+")
    if at and ":" not in user:
        return 0 if _USER_IS_NO_SECRET.intersection(kinds) else len(user) + 1
    if not at and ":" not in authority:
        return 0
    if not at and kinds[-1] in _HTTP and _is_host_and_port(authority) and rest[len(authority) :][:1] in ("", "/"):
        return 0
    return rest.rfind("@") + 1


def _authority(rest: str) -> str:
    match = _AUTHORITY.match(rest)
    return match[0] if match else ""


def _is_host_and_port(authority: str) -> bool:
    try:
        parts = urlsplit(f"//{authority}")
        return parts.port is not None or authority.endswith("]")
    except ValueError:
        return False
