"""Hide known secrets in text, in each form in which programs print them, and in whatever chunks the text arrives.

A program rarely prints a secret as one literal. It prints a PEM file line by line, a JSON document by its fields, or a
value as its `repr`, as JSON, percent-encoded or in base64. So a secret is hidden by its parts, and each part in all of
these forms.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from shoal.secrets.redaction import HIDDEN, is_secret_name, is_secret_variable, secrets_in

_SHORTEST = 6
"""Smallest length, in characters, of the parts that are hidden. A shorter part would match parts of ordinary words."""

_SHORTEST_JSON_LEAF = 12
"""Smallest length of a text in a JSON secret that is hidden although its key is no name of a secret. Shorter texts are
names of projects, regions and users, which would then be missing in all messages."""

_DEEPEST = 3
"""Number of times that a secret is decoded, such as JSON in base64 in JSON."""

_PEM_ARMOUR = re.compile(r"-{3,} ?(?:BEGIN|END) [A-Z0-9 ]+-{3,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_PERCENT_ESCAPE = re.compile("%[0-9A-F]{2}")
_BASE64_WIDTHS = (64, 76)
"""Widths to which programs wrap base64: PEM, and MIME with the command ``base64``."""


class KnownSecrets:
    """Set of secrets that can be found in text, by their parts and in all forms of :func:`forms`.

    Args:
        secrets: The secrets. A part of fewer than 6 characters is not hidden.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        needles = {form for secret in secrets for part in parts(secret) for form in forms(part)}
        needles = {needle for needle in needles if len(needle) >= _SHORTEST}
        self._by_head: dict[str, list[str]] = {}
        for needle in sorted(needles, key=len, reverse=True):
            self._by_head.setdefault(needle[:_SHORTEST], []).append(needle)
        self._heads = re.compile(_alternation(self._by_head)) if needles else None
        self._starts = {needle[:length] for needle in needles for length in range(1, _SHORTEST)}
        self._longest = max(map(len, needles), default=0)

    def hide(self, text: str, *, goes_on: bool = False) -> str:
        """Return a copy of a text in which the secrets are hidden.

        Args:
            text: The text.
            goes_on: Whether the text goes on. An end that may be the beginning of a secret is then left out.
        """
        end = self._open(text) if goes_on else len(text)
        return _without(text[:end], [span for span in self._spans(text) if span[0] < end])

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each stretch of a text that consists of secrets. Secrets that overlap are one
        stretch."""
        found: list[tuple[int, int]] = []
        for start in self._candidates(text, 0):
            needles = self._by_head[text[start : start + _SHORTEST]]
            end = next((start + len(needle) for needle in needles if text.startswith(needle, start)), None)
            if end is None:
                continue
            if found and start < found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        return found

    def _open(self, text: str) -> int:
        """Return the first position from which the end of a text may be the beginning of a secret; the length of the
        text if there is none."""
        for start in self._candidates(text, max(0, len(text) - self._longest + 1)):
            rest = text[start:]
            if any(len(needle) > len(rest) and needle.startswith(rest) for needle in self._by_head[rest[:_SHORTEST]]):
                return start
        for start in range(max(0, len(text) - _SHORTEST + 1), len(text)):
            if text[start:] in self._starts:
                return start
        return len(text)

    def _candidates(self, text: str, position: int) -> Iterator[int]:
        """Yield each position after `position` at which the first characters of a secret stand."""
        if self._heads is None:
            return
        match = self._heads.search(text, position)
        while match:
            yield match.start()
            match = self._heads.search(text, match.start() + 1)


class SecretStream:
    """Filter that hides secrets in a text that arrives in chunks.

    The result does not depend on the chunks. The filter holds back only an end of the text that may be the beginning of
    a secret, so it never holds more than the longest form of a secret.

    Args:
        secrets: The secrets.
    """

    def __init__(self, secrets: KnownSecrets) -> None:
        self._secrets = secrets
        self._held = ""
        self._covered = 0  # length of the beginning of `_held` for which HIDDEN was returned already

    def feed(self, chunk: str) -> str:
        """Take the next chunk, and return the text that is complete, without secrets."""
        text = self._held + chunk
        spans = self._secrets._spans(text)
        cut = self._secrets._open(text)
        shown = self._shown(text, spans, cut)
        if cut:
            self._covered = max((end - cut for start, end in self._known(spans) if start < cut < end), default=0)
        self._held = text[cut:]
        return shown

    def end(self) -> str:
        """Return the rest of the text. A beginning of a secret is hidden if it has 6 or more characters."""
        text, self._held = self._held, ""
        is_beginning = len(text) >= _SHORTEST and self._secrets._open(text) == 0
        shown = self._shown(text, [(0, len(text))] if is_beginning else self._secrets._spans(text), len(text))
        self._covered = 0
        return shown

    def _known(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the stretches, of which the first includes the part of the text that was hidden already."""
        if not self._covered:
            return spans
        end = self._covered
        later = list(spans)
        while later and later[0][0] < end:
            end = max(end, later.pop(0)[1])
        return [(0, end), *later]

    def _shown(self, text: str, spans: list[tuple[int, int]], cut: int) -> str:
        known = self._known(spans)
        if self._covered:
            # The first stretch continues one for which HIDDEN was returned already.
            skip = min(known[0][1], cut)
            return _without(text[skip:cut], [(start - skip, end - skip) for start, end in known[1:] if start < cut])
        return _without(text[:cut], [span for span in known if span[0] < cut])


def parts(secret: str, depth: int = 0) -> set[str]:
    """Return the parts of a secret that are secret themselves.

    The parts are the whole secret, its lines except the first and last line of a PEM file, the passwords and tokens in
    it, and the texts and numbers of a JSON document. If the secret is encoded in base64 or percent-encoded, or contains
    ``\\n`` for line breaks, the parts of the decoded text are parts, too.
    """
    secret = secret.strip()
    if len(secret) < _SHORTEST or _PEM_ARMOUR.fullmatch(secret):
        return set()
    found = {secret}
    if depth == _DEEPEST:
        return found
    for line in secret.splitlines():
        line = line.strip()
        if len(line) >= _SHORTEST and not _PEM_ARMOUR.fullmatch(line):
            found |= {line, *secrets_in(line)}
    for text in (*_json_leaves(secret), *_decoded(secret)):
        found |= parts(text, depth + 1)
    return {part for part in found if len(part) >= _SHORTEST}


def forms(part: str) -> set[str]:
    """Return the forms in which programs print a text: as it is, as `repr` and JSON (also one inside the other),
    percent-encoded, in base64 and in hexadecimal digits."""
    once = _escaped(part)
    encoded = part.encode(errors="surrogatepass")
    # Programs differ in the characters that they do not percent-encode, and in the case of the digits.
    quoted = {quote(encoded, safe) for safe in ("", "/", "!*'()", "/:", "!$&'()*+,;=:@/?")} | {quote_plus(encoded)}
    return {
        *once,
        *(twice for form in once for twice in _escaped(form)),
        *quoted,
        *(_PERCENT_ESCAPE.sub(lambda escape: escape[0].lower(), form) for form in quoted),
        *_base64(encoded),
        encoded.hex(),
        encoded.hex().upper(),
    }


def _json_leaves(secret: str) -> Iterator[str]:
    """Yield the texts and numbers of a JSON document that are secret; nothing if the secret is no JSON document."""
    if secret[0] not in '{["':
        return
    try:
        document = json.loads(secret, strict=False)
    except (ValueError, RecursionError):
        return
    waiting: list[tuple[Any, bool]] = [(document, isinstance(document, str))]
    while waiting:
        value, is_named = waiting.pop()
        if isinstance(value, dict):
            waiting += [
                (item, is_named or is_secret_name(key) or is_secret_variable(key)) for key, item in value.items()
            ]
        elif isinstance(value, list):
            waiting += [(item, is_named) for item in value]
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            leaf = str(value)
            if is_named or len(leaf) >= _SHORTEST_JSON_LEAF:
                yield leaf


def _decoded(secret: str) -> Iterator[str]:
    """Yield the texts that a program gets if it decodes a secret."""
    yield from (text for text in (unquote(secret), secret.replace("\\n", "\n")) if text != secret)
    joined = "".join(secret.split())
    if _BASE64.fullmatch(joined):
        digits = joined.rstrip("=").translate(str.maketrans("-_", "+/"))
        try:
            text = base64.b64decode(digits + "=" * (-len(digits) % 4)).decode()
        except ValueError:
            return
        if all(character.isprintable() or character.isspace() for character in text):
            yield text


def _escaped(text: str) -> set[str]:
    """Return a text as it stands between the quotes of a `repr` or of JSON."""
    encoded = text.encode(errors="surrogatepass")
    return {
        text,
        # A `repr` escapes its quotes only if the whole text contains both kinds of quotes. The text may be a part of a
        # longer text, so both forms are possible. The quotes at the end of the argument choose the form.
        repr(text + "\"'")[1:-4],
        repr(text)[1:-1],
        ascii(text + "\"'")[1:-4],
        repr(encoded + b"\"'")[2:-4],
        repr(encoded)[2:-1],
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
    }


def _base64(encoded: bytes) -> Iterator[str]:
    """Yield the base64 forms of a text, also if it is a part of a longer text.

    The form of a part depends on the number of bytes before it, modulo 3. Characters at the edges, which also encode
    bytes of the text around the part, are left out.
    """
    for altchars in (b"+/", b"-_"):
        whole = base64.b64encode(encoded, altchars).decode()
        yield from (whole, whole.rstrip("="))
        for width in _BASE64_WIDTHS:
            if len(whole) > width:
                yield from (whole[start : start + width] for start in range(0, len(whole), width))
        for before, skipped in ((0, 0), (1, 2), (2, 3)):
            shifted = base64.b64encode(bytes(before) + encoded, altchars).decode()
            partial = 0 if (before + len(encoded)) % 3 == 0 else 1
            yield shifted.rstrip("=")[skipped : len(shifted.rstrip("=")) - partial]


def _alternation(heads: Collection[str]) -> str:
    """Return the pattern of texts of equal length. Texts with the same two first characters are grouped, because
    Python tries the alternatives of a pattern one after the other."""
    groups: dict[str, dict[str, list[str]]] = {}
    for head in heads:
        groups.setdefault(head[0], {}).setdefault(head[1], []).append(re.escape(head[2:]))
    firsts = []
    for first, seconds in groups.items():
        branches = [f"{re.escape(second)}(?:{'|'.join(rests)})" for second, rests in seconds.items()]
        firsts.append(f"{re.escape(first)}(?:{'|'.join(branches)})")
    return "|".join(firsts)


def _without(text: str, spans: Iterable[tuple[int, int]]) -> str:
    shown, at = [], 0
    for start, end in spans:
        shown += [text[at:start], HIDDEN]
        at = end
    return "".join([*shown, text[at:]])
