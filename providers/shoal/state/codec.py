"""Encode values for the store, so that SQLite and PostgreSQL accept and return the same values.

JSON has no NaN and no infinity, but Python's `json` writes them nevertheless. PostgreSQL rejects such JSON, and SQLite
accepts it. So this module writes NaN as ``{"$float": "nan"}`` (the tag ``$float`` marks an encoded number), and
infinity in the same way. PostgreSQL also rejects the character NUL in a text, and both databases reject a lone
surrogate (half of a UTF-16 pair, which Python allows in a str). So these characters are escaped.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_TAG = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LIKE_TAG = re.compile(r"\$+float")
"""Pattern of the keys that look like the tag ``$float``. If a user's document contains such a key, one more ``$`` is
written before the key, so that the user's ``{"$float": "nan"}`` is not read as NaN."""


def dump_json(document: Any) -> str:
    r"""Encode a document as strict JSON in ASCII. NUL and surrogates are written as escapes, such as ``\u0000``."""
    return json.dumps(_tagged(document), allow_nan=False)


def load_json(written: str | bytes) -> Any:
    """Decode a document that `dump_json` has written."""
    return json.loads(written, object_hook=_untagged)


def storable(text: str) -> str:
    r"""Escape the characters that databases reject: NUL as ``\x00``, and a lone surrogate as, for example,
    ``\udc80``."""
    return text.replace("\0", r"\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if key := _tag_key(value):
        return {f"${key}": _tagged(value[key])}
    return {key: _tagged(item) for key, item in value.items()}


def _untagged(value: dict[str, Any]) -> Any:
    key = _tag_key(value)
    if key is None:
        return value
    inner = value[key]
    if key != _TAG:
        return {key[1:]: inner}
    return _SPECIAL[inner] if isinstance(inner, str) and inner in _SPECIAL else value


def _tag_key(value: dict[Any, Any]) -> str | None:
    """Return the key of a dict that has a single key such as ``$float`` or ``$$float`` (see `_LIKE_TAG`). Return None
    for all other dicts."""
    if len(value) != 1:
        return None
    [key] = value
    return key if isinstance(key, str) and _LIKE_TAG.fullmatch(key) else None
