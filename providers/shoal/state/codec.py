"""Encode values for the store, so that SQLite and PostgreSQL accept and return the same values.

JSON has no NaN and no infinity. Python's `json` writes them nevertheless, PostgreSQL rejects them, and SQLite accepts
any text. So NaN is written as ``{"$float": "nan"}``, and infinity likewise. PostgreSQL also rejects NUL in a text, and
neither database accepts a lone surrogate.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_TAG = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LIKE_TAG = re.compile(r"\$+float")
"""Keys to which one more ``$`` is added, so that a user's own ``{"$float": "nan"}`` is not read as NaN."""


def dumps(document: Any) -> str:
    """Encode a document as strict JSON in ASCII. NUL and surrogates are written as escapes."""
    return json.dumps(_tagged(document), allow_nan=False)


def loads(written: str | bytes) -> Any:
    """Decode a document written by `dumps`, or by shoal 0.1, which wrote bare NaN and Infinity to SQLite."""
    return json.loads(written, object_hook=_untagged)


def storable(text: str) -> str:
    r"""Escape characters that databases reject: NUL becomes ``\x00``, a lone surrogate for example ``\udc80``."""
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
    """Return the key of a dict if it is the only one and looks like the tag, else None."""
    if len(value) != 1:
        return None
    [key] = value
    return key if isinstance(key, str) and _LIKE_TAG.fullmatch(key) else None
