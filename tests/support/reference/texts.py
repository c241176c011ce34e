"""Texts and tables of the reference from docstrings and signatures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from enum import EnumType
from typing import Any

_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")


def paragraph(doc: str) -> str:
    """Return the first paragraph of a docstring."""
    return plain(doc.partition("\n\n")[0])


def plain(text: str) -> str:
    """Return a text in one line, with the markup of these pages."""
    return re.sub(r":\w+:`", "`", " ".join(text.split()).replace("``", "`"))


def cell(text: str) -> str:
    return plain(text).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with an empty one after them; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *lines, ""] if lines else []


def default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    shown = list(value) if isinstance(value, tuple) else value
    # The text of a function or an object contains its address.
    return "" if repr(shown).startswith("<") else f"`{shown!r}`"


def section(doc: str, name: str) -> str:
    """Return the text below a heading such as ``Args:`` of a docstring, without its indent."""
    others = "|".join(_SECTIONS)
    found = re.search(rf"^{name}:\n(.*?)(?=^(?:{others}):\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    return inspect.cleandoc(found[1]) if found else ""


def entries(text: str) -> dict[str, str]:
    """Return the descriptions in a section that has a name and a colon before each of them."""
    found = re.findall(
        r"^\*{0,2}(\w+)(?: \([^)]*\))?: (.*?)(?=^\*{0,2}\w+(?: \([^)]*\))?: |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return {name: plain(described) for name, described in found}


def arguments(doc: str) -> dict[str, str]:
    """Return the descriptions of the arguments in a docstring of Google's style, or in one with ``:param`` lines."""
    found = re.findall(r"^:param (\w+): (.*?)(?=^:|\Z)", doc, re.DOTALL | re.MULTILINE)
    return entries(section(doc, "Args")) or {name: plain(text) for name, text in found}


def signature(thing: Any) -> str:
    """Return the arguments of a function or class, without types."""
    if isinstance(thing, EnumType):
        return "(value)"  # Python's own signature differs between its versions
    try:
        given = inspect.signature(thing)
    except (TypeError, ValueError):
        return "()"
    parameters = [
        each.replace(annotation=each.empty)
        for each in given.parameters.values()
        # An argument of the type Never is there to be refused.
        if each.name not in ("self", "cls") and each.annotation != "Never"
    ]
    shown = [
        each.replace(default=...) if default(each.default) == "" and each.default is not each.empty else each
        for each in parameters
    ]
    return str(given.replace(parameters=shown, return_annotation=given.empty)).replace("Ellipsis", "...")
