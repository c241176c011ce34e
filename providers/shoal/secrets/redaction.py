"""Remove credentials from text before shoal stores, returns, logs or raises it.

Credentials are the user and password of a URI, parameters and settings with a secret name (``?sig=``, ``password=``,
``PWD=``, ``"api_key": "…"``), and the value of an ``Authorization`` header. A well-formed URI is parsed according to
RFC 3986. If a password is not percent-encoded (``/ # ? @``), everything up to the last ``@`` counts as the password. So
the result may hide more than necessary, but never less.

One form cannot be distinguished from a host and port: an http URI whose raw password is a number followed by ``/``
(``http://me:12/34@host``). No client can log in with such a URI either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*$")
_SCHEME_LENGTH = 40
"""Number of characters before ``://`` that are searched for the scheme of a URI. All registered schemes are shorter.
The limit keeps the search in long texts fast."""
_URI = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.:-]*://[^\r\n]*\Z")
"""Pattern of a text that is nothing but a URI. The text may contain spaces, because a password that is not
percent-encoded may contain them."""

_ADDRESS = re.compile(r"\s*(?:[A-Za-z][A-Za-z0-9+.-]+://?|//)(?!/)")
"""Pattern of the beginning of an address, which may have no scheme, or one slash after it."""

_AUTHORITY = re.compile(r"[^/?#]*")
_WORD = re.compile(r"[^\s\"'<>`]*")
_PASSWORD_REACH = 256
"""Number of characters after ``://`` that are searched for an ``@``, if a URI in a longer text seems to contain a
password with a space or a quote."""

_HTTP = frozenset({"http", "https", "ws", "wss", "hdfs", "webhdfs", "mlflow-artifacts", "ray", "grpc", "tcp"})
"""Schemes whose URIs have the form ``host:port/path``. The path may contain an ``@``, so text before such an ``@`` is
not always a password."""
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
"""Schemes in which the text before the ``@`` is no secret if there is no password. It is then the name of an Azure
container or of a user. In other schemes, it may be a token."""

STORAGE_SCHEMES = ("s3", "iceberg")
"""Schemes in which the text before the ``@`` is the name of a storage, if it is a legal name."""
STORAGE_NAME = r"(?![A-Z0-9]{16,}(?![\w.-])|[A-Za-z0-9_.-]*[A-Za-z0-9]{32})[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
"""Pattern of the names of storages. It matches no access key of AWS (20 capitals and digits) and no long token."""

_SCHEMES = "|".join(map(re.escape, sorted(_HTTP | _STORAGE | _DATABASES | {"file", "s3", "s3a", "gs", "gcs"})))
_FEW_SLASHES = re.compile(
    rf"(?:(?<![:\w/])//|\b(?:{_SCHEMES}):/?(?!/))(?P<user>[^/?#@\s\"':]*:(?P<value>[^@\s\"'<>]+)@)", re.IGNORECASE
)
"""Pattern of a URI with credentials that has no scheme, or fewer than two slashes. Users mistype URIs in this way, and
some code replaces two slashes by one."""

_STRONG = (
    r"(?:[\w.-]*[_.-])?(?:"
    r"(?:ssl)?pass(?:word|wd|phrase)|pwd|secret|"
    r"(?:secret|private|api|account|(?:shared[_.-]?)?access|storage|service)[_.-]?key|secret[_.-]?access[_.-]?key|"
    r"shared[_.-]?access[_.-]?signature|connection[_.-]?string|sas[_.-]?token|"
    r"(?:o?auth2?|access|api|bearer|session|security|refresh|hf|github|gitlab)[_.-]?token"
    r")|(?:client|app|shared)secret|credentials?|token|authorization"
)
"""Pattern of names whose values are hidden in any text. Names such as ``pad_token`` do not match, because they are
parameters of language models, not secrets."""
_WEAK = (
    rf"{_STRONG}|[\w.-]*(?:token|password|secret|signature|credentials?|access_?key(?:_?id)?|accessid)|"
    "sig|sas|pass|key|code|auth|jwt|odbc_connect"
)
"""Pattern of names whose values are hidden in the query of a URI (``?name=value``). It matches more names than
`_STRONG`, because short names such as ``sig`` and ``key`` are often secrets there."""

_SECRET_NAME = re.compile(_STRONG, re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"(?!GOOGLE_APPLICATION_CREDENTIALS\Z)\w*?(?:TOKEN|PASSWORD|PASSWD|PASSPHRASE|PWD|SECRET|CREDENTIALS?|"
    r"ACCESS_KEY_ID|CONNECTION_STRING|APIKEY|(?:\b|_)(?:KEY|PASS|SAS))(?:_?(?:RAW|PEM|BASE64|B64|\d+))?",
    re.IGNORECASE,
)
"""Pattern of the names of environment variables whose values are secret. Names that end with ``_FILE`` or ``_PATH`` do
not match, nor does GOOGLE_APPLICATION_CREDENTIALS: their values are paths."""
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


_LAST = {
    last: re.compile(rf"{last}\s*=")
    for last in (
        *("password", "passwd", "phrase", "pwd", "secret", "key", "signature", "string", "token", "credential"),
        *("credentials", "authorization"),
    )
}
"""The last words of all names that `_STRONG` matches, each with its pattern before a value."""
_LIKE_ASCII = "ſKıİ"
"""Letters that patterns match as s, k and i if they ignore the case."""

_LONG = 4096
_LONG_WORD = re.compile(rf"[^\s\"'<>`]{{{_LONG},}}")
_MOST_STEPS = 20_000_000
"""Largest number of search steps for one word. At each colon of a word, credentials may begin that extend to the end of
the word. So the number of steps is the number of colons times the length of the word. If a word needs more steps than
this limit (about 0.5 s), the word is not searched, but hidden as a whole."""


class _Span(NamedTuple):
    """A part of a text that has to be replaced: its start and end, the new text, and the secret in the old text."""

    start: int
    end: int
    replacement: str
    secret: str


Hide = Callable[..., str]
"""Type of a function that hides known secrets in a text: that of `KnownSecrets.hide`."""


def _unchanged(text: str, *, goes_on: bool = False) -> str:
    return text


_hide_known: Hide = _unchanged
"""Function that hides the known secrets of this process; see :func:`hiding`."""


@contextmanager
def hiding(hide: Hide) -> Iterator[None]:
    """Let :func:`redact`, :func:`hide_known` and :func:`redact_all` also hide known secrets while the ``with`` block
    runs.

    All threads of the process use the function, because any of them may raise or log an error that contains a secret.
    """
    global _hide_known
    before, _hide_known = _hide_known, hide
    try:
        yield
    finally:
        _hide_known = before


def redact(text: str) -> str:
    """Remove the credentials from a text. A text without credentials is returned unchanged."""
    text = _hide_known(text)
    return _replaced(text, _spans(text, whole=False))


def hide_known_so_far(text: str) -> str:
    """Return the beginning of a text without the known secrets of this process, and without an end that may be the
    beginning of a secret."""
    return _hide_known(text, goes_on=True)


def hide_known(document: Any) -> Any:
    """Return a copy of a JSON document without the known secrets of this process, in keys and texts."""
    if isinstance(document, dict):
        return {hide_known(key): hide_known(item) for key, item in document.items()}
    if isinstance(document, list | tuple):
        return [hide_known(item) for item in document]
    return _hide_known(document) if isinstance(document, str) else document


def redact_value(value: str) -> str:
    """Remove the credentials from the value of a field. If the whole value is a URI, spaces and quotes are treated as
    parts of this URI."""
    return _replaced(value, _spans(value, whole=_URI.match(value) is not None))


def redact_address(text: str) -> str:
    """Remove the credentials from the value of a field that was refused, perhaps because it is a mistyped address.

    Unlike :func:`redact_value`, this function hides everything before the last ``@``, also without a scheme, and a
    host with a colon that no port follows, because such a host may be a user and a password.
    """
    if not (match := _ADDRESS.match(text)):
        return redact_value(text)
    rest = text[match.end() :]
    authority = _beginning(_AUTHORITY, rest)
    if "@" in authority or (":" in authority and not _is_host_and_port(authority)):
        _, at, behind = rest.rpartition("@")
        rest = behind if at else HIDDEN + rest[len(authority) :]
    return redact_value(match[0] + rest)


def has_credentials(value: str) -> bool:
    """Return whether a value contains credentials that :func:`redact_value` would remove."""
    return redact_value(value) != value


def secrets_in(value: str) -> set[str]:
    """Return the secrets (passwords, keys and tokens) in the value of a field.

    Each secret is in the result in three forms: as it is written, percent-decoded, and percent-encoded. A library's
    error message may contain any of these forms.
    """
    found = {
        secret
        for span in _spans(value, whole=_URI.match(value) is not None)
        for secret in (span.secret, unquote(span.secret), quote(unquote(span.secret), safe=""))
    }
    return found - {""}


def is_secret_name(name: str) -> bool:
    """Return whether the name of a setting, such as ``password`` or ``api_key``, means that its value is a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable, such as ``PGPASSWORD``, means that its value is a secret.

    This function treats more names as secret than :func:`is_secret_name` does, because environment variables such as
    ``DATABRICKS_TOKEN`` cannot be confused with parameters of language models such as ``pad_token``.
    """
    return is_secret_name(name) or _SECRET_VARIABLE.fullmatch(name) is not None


@contextmanager
def redacted_errors(uri: str) -> Iterator[None]:
    """Remove a URI's credentials from an error that is raised in the ``with`` block.

    The traceback does not show the errors that led to this error (its cause and context), because they may contain the
    credentials, too.
    """

    def shown(part: object) -> object:
        if not isinstance(part, str):
            return part
        # A filesystem's error may contain the path of the URI without the scheme. `redact_value` would not recognize
        # this path as a URI, so the known secrets are replaced before `redact_value` is called.
        for secret in secrets_in(uri):
            part = part.replace(secret, HIDDEN)
        return redact_value(part)

    try:
        yield
    # All types of exceptions are caught, because each filesystem library raises exceptions of its own types.
    except Exception as error:
        if not has_credentials(uri):
            raise
        error.args = tuple(map(shown, error.args))
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = shown(error.filename)
        raise error from None


class RedactedRepr:
    """Mixin that removes credentials from `repr` and `str`. In a class definition, put the mixin before the base class
    that defines these two methods."""

    def __repr__(self) -> str:
        return redact(super().__repr__())

    def __str__(self) -> str:
        return redact(super().__str__())


def redact_all(document: Any) -> Any:
    """Return a copy of a JSON document without credentials.

    Credentials in texts are removed, and texts whose key is the name of a secret are hidden as a whole.
    """
    if isinstance(document, dict):
        return {
            hide_known(key): HIDDEN if isinstance(item, str) and item and is_secret_name(key) else redact_all(item)
            for key, item in document.items()
        }
    if isinstance(document, list | tuple):
        return [redact_all(item) for item in document]
    return redact_value(_hide_known(document)) if isinstance(document, str) else document


def _replaced(text: str, spans: list[_Span]) -> str:
    parts, at = [], 0
    for span in spans:
        # This secret overlaps the previous one. The replacement of the previous secret stands for both secrets, so
        # remove only the rest of this secret.
        if span.start < at:
            at = max(at, span.end)
            continue
        parts += [text[at : span.start], span.replacement]
        at = span.end
    return "".join([*parts, text[at:]])


def _spans(text: str, *, whole: bool) -> list[_Span]:
    if "=" not in text and ":" not in text:
        return []
    # A long word fills one of these parts. This search is 30 times as fast as that for the words.
    parts = (text[at : at + _LONG // 2] for at in range(0, len(text) - _LONG // 2 + 1, _LONG // 2))
    long = _LONG_WORD.finditer(text) if any(len(part.split(None, 1)) < 2 for part in parts) else ()
    dense = [match for match in long if match[0].count(":") * len(match[0]) > _MOST_STEPS]
    for match in dense:
        text = text[: match.start()] + " " * len(match[0]) + text[match.end() :]
    # The search for these patterns is slow, and most texts cannot contain them.
    few_slashes = _FEW_SLASHES.finditer(text) if "@" in text else ()
    lower, is_odd = text.lower(), any(letter in text for letter in _LIKE_ASCII)
    named = []
    if any(mark in text for mark in "?&;#"):
        named.append(_QUERY_ALL if whole else _QUERY_WORD)
    if '"' in text or "'" in text:
        named.append(_ENTRY)
    if is_odd or "authorization" in lower:
        named.append(_HEADER)
    if is_odd or any(last in lower and end.search(lower) for last, end in _LAST.items()):
        named.append(_SETTING)
    values = (match for pattern in named for match in pattern.finditer(text) if match["value"] != HIDDEN)
    found = [
        *(_Span(*match.span(), HIDDEN, match[0]) for match in dense),
        *_users(text, whole=whole),
        *(_Span(*match.span("user"), "", match["value"]) for match in few_slashes),
        *(_Span(*match.span("value"), HIDDEN, match["value"].strip("'\"{}")) for match in values),
    ]
    return sorted(found, key=lambda span: (span.start, -span.end))


def _users(text: str, *, whole: bool) -> Iterator[_Span]:
    """Yield the position of user and password in each URI of a text."""
    at = text.find("://")
    while at >= 0:
        start = at + 3
        if scheme := _SCHEME.search(text[max(0, at - _SCHEME_LENGTH) : at]):
            rest = text[start:] if whole else _rest_of_uri(text, start)
            end = _user_length(scheme[0].lower(), rest)
            if end:
                user, colon, password = rest[: end - 1].partition(":")
                yield _Span(start, start + end, "", password if colon else user)
        at = text.find("://", start)


def _rest_of_uri(text: str, start: int) -> str:
    """Return the text after the ``://`` of a URI, as far as the text may belong to this URI.

    The part ends at the next space or quote. If a password seems to contain spaces or quotes, because it is not
    percent-encoded, the part goes on to the end of the word with the next ``@``.
    """
    word = _beginning(_WORD, text, start)
    authority = _beginning(_AUTHORITY, word)
    if "@" in word or ":" not in authority or _is_host_and_port(authority):
        return word
    ahead = text[start : start + _PASSWORD_REACH].split("\n", 1)[0].split("://", 1)[0]
    behind = ahead.find("@") + 1
    return ahead[:behind] + _beginning(_WORD, text, start + behind) if behind else word


def _user_length(scheme: str, rest: str) -> int:
    """Return the length of the part ``user:password@`` that follows the ``://`` of a URI, or 0 if this part contains no
    secret.
    """
    authority = _beginning(_AUTHORITY, rest)
    user, at, _ = authority.rpartition("@")
    kinds = scheme.split("+")
    if at and ":" not in user:
        is_storage = scheme in STORAGE_SCHEMES and re.fullmatch(STORAGE_NAME, user)
        return 0 if is_storage or _USER_IS_NO_SECRET.intersection(kinds) else len(user) + 1
    if not at and ":" not in authority:
        return 0
    if not at and kinds[-1] in _HTTP and _is_host_and_port(authority) and rest[len(authority) :][:1] in ("", "/"):
        return 0
    return rest.rfind("@") + 1


def _beginning(pattern: re.Pattern[str], text: str, start: int = 0) -> str:
    match = pattern.match(text, start)
    return match[0] if match else ""


def _is_host_and_port(authority: str) -> bool:
    try:
        parts = urlsplit(f"//{authority}")
        return parts.port is not None or authority.endswith("]")
    except ValueError:
        return False


_LONGEST_LINE = 300


def one_line(text: str) -> str:
    """Return a text as one line of about 300 characters.

    If the text is longer, only its beginning and its end are kept, because the cause may be in either part. Some
    libraries name the cause first and then list the allowed values, but a chain of errors ends with the cause.
    """
    line = " ".join(redact(text).split())
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} … {line[-half:]}"
