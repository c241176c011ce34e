"""The reference of the Python API, of the Prefect collection, and of errors."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from shoal import errors
from shoal.pool.spec import LeaseOptions, PoolFields, ScaleOptions
from tests.support.reference.specs import fields, on_page
from tests.support.reference.texts import arguments, cell, default, entries, paragraph, plain, section, signature, table

MODULES = (
    "shoal",
    "shoal.data",
    "shoal.distributors.xgboost",
    "shoal.distributors.lightgbm",
    "shoal.distributors.pytorch",
    "shoal.distributors",
    "shoal.many",
    "shoal.tune",
    "shoal.jobs",
    "shoal.models",
    "shoal.history",
    "shoal.airflow.hooks",
    "shoal.airflow.results",
    "shoal.airflow.notifications",
)
"""The modules whose names users import."""


def page() -> str:
    """Return the page of the Python API."""
    head = [
        "# Python",
        "",
        "What `import` gives. Fields of specs are in [specs](specs.md), those of pools in [pools](pools.md).",
        "",
    ]
    seen: dict[int, str] = {}
    return "\n".join(head + [line for name in MODULES for line in _module(importlib.import_module(name), seen)])


def prefect_page() -> str:
    """Return the page of the Prefect collection."""
    head = [
        "# Prefect",
        "",
        "The guide is [prefect.md](../prefect.md). A task whose name begins with `a` is the same for `await`.",
        "",
    ]
    module = importlib.import_module("shoal.prefect")
    names = [name for name in public_names(module) if not (name[0] == "a" and hasattr(module, name[1:]))]
    return "\n".join([*head, *(line for name in names for line in _entry(name, getattr(module, name), "##"))])


def errors_page() -> str:
    """Return the page of errors."""
    head = [
        "# Errors",
        "",
        "All are subclasses of `shoal.errors.ShoalError`. An error that is *permanent* comes back with each retry.",
        "",
    ]
    rows = []
    for name in public_names(errors):
        kind = getattr(errors, name)
        if not inspect.isclass(kind):
            continue
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not object)
        rows.append(
            (f"`{name}`", bases, "permanent" if kind.permanent else "", cell(paragraph(inspect.getdoc(kind) or "")))
        )
    return "\n".join([*head, *table(("error", "is a", "", "meaning"), rows)])


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module offers: those of `__all__`, else its own classes and functions."""
    given = getattr(module, "__all__", None)
    if given is not None:
        return sorted(given)
    if module.__name__ == "shoal.prefect":  # offers names of its modules, one import each
        return sorted(
            name
            for name in vars(module)
            if not name.startswith("_") and not inspect.ismodule(getattr(module, name)) and name != "annotations"
        )
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and value.__module__ == module.__name__
    )


def _module(module: ModuleType, seen: dict[int, str]) -> list[str]:
    lines = [f"## {module.__name__}", "", paragraph(inspect.getdoc(module) or ""), ""]
    for name in public_names(module):
        thing = getattr(module, name)
        if id(thing) in seen:
            lines += [f"### {module.__name__}.{name}", "", f"The same as `{seen[id(thing)]}`.", ""]
            continue
        seen[id(thing)] = f"{module.__name__}.{name}"
        lines += _entry(f"{module.__name__}.{name}", thing)
    return lines


def _entry(title: str, thing: Any, level: str = "###") -> list[str]:
    """Return the section of a class or function."""
    described = getattr(thing, "fn", thing)  # a task of Prefect has its function there
    doc = inspect.getdoc(described) or ""
    lines = [f"{level} {title}", "", paragraph(doc), ""]
    if inspect.isclass(described) and issubclass(described, BaseModel):
        return lines[:2] + _fields_of(described)
    if not callable(described):
        return lines
    lines += [f"    {described.__name__}{signature(described)}", ""]
    lines += _arguments(described, doc)
    if inspect.isclass(described):
        lines += table(
            ("attribute", "meaning"),
            ((f"`{name}`", cell(text)) for name, text in entries(section(doc, "Attributes")).items()),
        )
        lines += table(("method", "what it does"), _methods(described))
    for name, verb in (("Returns", "Returns"), ("Yields", "Yields")):
        if text := section(doc, name):
            lines += [f"{verb}: {plain(text)}", ""]
    return [
        *lines,
        *table(("raises", "if"), ((f"`{name}`", cell(text)) for name, text in entries(section(doc, "Raises")).items())),
    ]


def _arguments(thing: Any, doc: str) -> list[str]:
    try:
        parameters = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return []
    found = arguments(doc)
    rows = [
        (f"`{name}`", default(parameters[name].default) if name in parameters else "", cell(text))
        for name, text in found.items()
    ]
    return table(("argument", "default", "meaning"), rows)


def _methods(kind: type) -> list[tuple[str, str]]:
    found = []
    for name, value in inspect.getmembers(kind):
        raw = inspect.getattr_static(kind, name)
        if name.startswith("_") or not str(getattr(value, "__module__", None) or "shoal").startswith("shoal"):
            continue
        if isinstance(raw, property):
            found.append((f"`{name}`", cell(paragraph(inspect.getdoc(raw) or ""))))
        elif callable(value) and not inspect.isclass(value):
            found.append((f"`{name}{signature(value)}`", cell(paragraph(inspect.getdoc(value) or ""))))
    return found


def _fields_of(kind: type[BaseModel]) -> list[str]:
    """Return what a model is, and its fields or a link to them."""
    if issubclass(kind, PoolFields):
        link = "[pools](pools.md)"
    elif kind in (ScaleOptions, LeaseOptions):
        link = f"[{kind.__name__}](pools.md#{kind.__name__.lower()})"
    elif kind in on_page():
        link = f"[{kind.__name__}](specs.md#{kind.__name__.lower()})"
    else:
        return fields(kind)
    return [paragraph(inspect.getdoc(kind) or ""), "", f"Its fields: {link}.", ""]
