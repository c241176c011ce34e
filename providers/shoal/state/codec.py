"""How values are written to the store, so that SQLite and PostgreSQL take the same ones and give back the same.

JSON has no NaN and no infinity. Python writes them nevertheless; PostgreSQL refuses them, and SQLite keeps any text. So
they are written as ``{"$float": "nan"}``. PostgreSQL also refuses NUL in a text, and neither database takes a surrogate
without its partner.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_TAG = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LIKE_TAG = re.compile(r"\$+float")
"""Keys that get one more ``$``, so that a user's own ``{"$float": "nan"}`` is told from a NaN."""


def dumps(document: Any) -> str:
    """Write a document as strict JSON in ASCII, where escapes stand for NUL and surrogates."""
    return json.dumps(_tagged(document), allow_nan=False)


def loads(written: str | bytes) -> Any:
    """Read what `dumps` wrote, or what shoal 0.1 did: it wrote bare NaN and Infinity to SQLite."""
    return json.loads(written, object_hook=_untagged)


def storable(text: str) -> str:
    r"""Escape what no database takes in a text: NUL becomes ``\x00``, a surrogate without its partner ``\udc80``."""
    return text.replace("\0", r"\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if key := _like_tag(value):
        return {f"${key}": _tagged(value[key])}
    return {key: _tagged(item) for key, item in value.items()}


def _untagged(value: dict[str, Any]) -> Any:
    key = _like_tag(value)
    if key is None:
        return value
    inner = value[key]
    if key != _TAG:
        return {key[1:]: inner}
    return _SPECIAL[inner] if isinstance(inner, str) and inner in _SPECIAL else value


def _like_tag(value: dict[Any, Any]) -> str | None:
    """The only key of a document that looks like the tag."""
    if len(value) != 1:
        return None
    [key] = value
    return key if isinstance(key, str) and _LIKE_TAG.fullmatch(key) else None
