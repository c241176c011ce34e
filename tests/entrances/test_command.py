"""Entrance: the arguments of the `shoal` command. There is no pool: everything is refused, or finds nothing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.errors import ShoalError
from shoal.pool.spec import PoolSpec
from tests.cli.conftest import document
from tests.entrances.wrong_values import SECRET, documents, many, number_texts, texts, urls

values = st.one_of(texts, number_texts, urls())

COMMANDS = st.sampled_from(
    [
        ["pool", "up"], ["pool", "list"], ["pool", "describe"], ["pool", "nodes"], ["pool", "scale"], ["pool", "alter"],
        ["pool", "down"], ["train"], ["jobs", "list"], ["jobs", "show"], ["jobs", "logs"], ["jobs", "cancel"], [],
        ["doctor", "x"], ["sweep", "x"],
    ]
)  # fmt: skip
OPTIONS = st.sampled_from(
    ["--json", "--pool", "--limit", "--min", "--rollback-after", "--min-nodes", "--max-nodes", "--async", "--detach",
     "--job-id", "--follow", "--abandon", "--version", "--wrong", "--"]
)  # fmt: skip

commands = st.builds(
    lambda command, first, rest: [*command, *first, *rest],
    COMMANDS,
    st.lists(values, max_size=1),
    st.lists(st.one_of(OPTIONS, values), max_size=4),
)


def ended_well(result: Result, arguments: list[str]) -> None:
    """With one of the documented exit codes, without a traceback, and with one JSON document where that was asked."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in range(5), result.output
    assert "Traceback" not in result.output
    assert SECRET not in result.output
    if "--json" in arguments and result.exit_code != 0:
        assert "error" in document(result.stdout)


def _would_start(arguments: list[str]) -> bool:
    for argument in arguments:
        try:
            PoolSpec.parse(argument)
        except ShoalError:
            continue
        return True
    return False


@many
@given(arguments=commands)
@example(arguments=["jobs", "list", "--limit", "99999999999999999999"])
@example(arguments=["jobs", "show", "\udcff", "--json"])
@example(arguments=["jobs", "list", "--pool", "\udcff", "--json"])
@example(arguments=["train", "a\0b"])
@example(arguments=["pool", "up", f"//user:{SECRET}@host"])
def test_arguments(nothing_left, arguments: list[str]):
    assume(not _would_start(arguments))
    assume(not any(argument in ("-h", "--help", "doctor", "sweep") for argument in arguments[2:]))
    ended_well(CliRunner().invoke(app, arguments, input=""), arguments)
    nothing_left()


SPECS = st.one_of(
    st.text(max_size=30),
    st.binary(max_size=30),
    st.dictionaries(texts, documents, max_size=3).map(json.dumps),
    st.sampled_from(["9" * 5000, "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, '{"a":' * 2000 + "1" + "}" * 2000]),
    st.sampled_from(["9" * 5000, "NaN", "[" * 500 + "]" * 500]).map('{{"n_estimators": {}}}'.format),
)


@many
@given(spec=SPECS, arguments=st.lists(st.one_of(OPTIONS, values), max_size=2))
def test_specs_on_stdin(nothing_left, spec: Any, arguments: list[str]):
    arguments = ["train", "-", *arguments]
    ended_well(CliRunner().invoke(app, arguments, input=spec), arguments)
    nothing_left()
