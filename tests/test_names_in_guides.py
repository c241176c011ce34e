"""The modules, classes, commands and options that the guides name exist: their examples do not use them all."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator

import pytest
import typer

from shoal.cli import app
from shoal.pool.spec import PoolSpec
from tests.support.guides import GUIDES, ROOT

NO_PYTHON = re.compile(
    r"shoal\.(alias|categories|data_\w+|decision|input_cols|missing|reason|spec_digest"  # tags in MLflow
    r"|(job|model)(\.\w+)*"  # events and resources of Prefect
    r"|readthedocs\.io"  # an annotation in Kubernetes
    r"|subject|text|html|json)"  # variables of a message's templates, and a file
)


def found(pattern: str) -> set[str]:
    return {match for page in GUIDES for match in re.findall(pattern, page.read_text())}


def test_dotted_names():
    source = "".join(file.read_text() for file in (ROOT / "providers").rglob("*.py"))
    named = {name for name in found(r"(?<![\w./@-])shoal(?:\.\w+)+") if not NO_PYTHON.fullmatch(name)}
    names = {name for name in named if f'"{name}"' not in source}  # metrics of OpenTelemetry
    assert "shoal.airflow.hooks.database_url" in names
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_pools_and_their_options():
    uris = found(r"local://[a-z][\w-]*(?:\?[\w=&,/.-]+)?")
    assert any("libraries=" in uri for uri in uris)
    for uri in sorted(uris):
        PoolSpec.parse(uri)


def in_code() -> Iterator[str]:
    """What the guides call on the command line: code in a line, and lines of blocks."""
    for page in GUIDES:
        for line in re.findall(r"`(shoal [a-z][^`\n]*)`|^(?:    )+(shoal [a-z].*)$", page.read_text(), re.MULTILINE):
            yield re.split(r" +#| [|&;]", "".join(line))[0]


@pytest.mark.parametrize("line", sorted(set(in_code())))
def test_commands_and_their_options(line):
    command, words = typer.main.get_command(app), line.split()[1:]
    while hasattr(command, "get_command") and words:
        command = command.get_command(typer.Context(command), words.pop(0))
        assert command, "no such command"
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options
