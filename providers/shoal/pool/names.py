"""Check the names of pools, and derive a valid pool name from any text."""

from __future__ import annotations

import re
from hashlib import sha256

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_RULE = "1 to 40 of a-z, 0-9 and -, starting and ending with a letter or digit (URI hosts are lower-cased)"
"""Description of the valid names of pools, for error messages and help texts."""


def is_pool_name(text: str) -> bool:
    """Check whether a text is a valid pool name."""
    return _NAME.fullmatch(text) is not None


def pool_name_of(text: str) -> str:
    """Derive a valid pool name from any text, for example from a notebook's name with spaces or quotation marks.

    The text is converted to lower case, and each sequence of characters that are neither letters a-z nor digits becomes
    one hyphen: ``"MY_NOTEBOOK"`` becomes ``my-notebook``. A valid pool name stays the same. If the result is empty or
    longer than 40 characters, its end is replaced by a hash of the text (8 hexadecimal digits).
    """
    if is_pool_name(text):
        return text
    name = "-".join(re.findall("[a-z0-9]+", text.lower()))
    if is_pool_name(name):
        return name
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[:31].rstrip('-')}-{digest}".lstrip("-")
