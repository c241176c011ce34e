"""Build the spec that a task of an engine describes by its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.jobs import ids
from shoal.jobs.files import code_store
from shoal.jobs.function_spec import FunctionJobSpec, parse_spec
from shoal.jobs.spec import JobSpec
from shoal.training.pytorch.train_func import TrainFunc, check_train_func, is_name

_NOT_STORED = "not stored yet"


def spec_of(
    given: JobSpec | FunctionJobSpec | Mapping[str, Any] | None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> JobSpec | FunctionJobSpec:
    """The spec that a task's arguments describe. A function that is no name is stored by value, with its arguments.

    Args:
        given: A spec, or its fields; beside `train_func` the fields that are not of the function itself.
        framework: What trains, where the fields do not say.
        train_func: The function.
        args: Its arguments; of a script, its command line.
        kwargs: Its arguments by name.

    Raises:
        InvalidArgumentError: Naming each field that is wrong, or what cannot be sent.
    """
    check_train_func(train_func, args, kwargs, framework=framework, fields=given)
    if train_func is None:
        if given is None:
            raise InvalidArgumentError("nothing says what to train: give a spec, or a train_func")
        if not isinstance(given, Mapping):
            return given
        return parse_spec({**given, **({"framework": framework} if framework else {})})
    assert given is None or isinstance(given, Mapping)
    fields = dict(given or {})
    if is_name(train_func):
        return FunctionJobSpec.parse({**fields, "train_func": train_func, "args": tuple(args), "kwargs": kwargs or {}})
    from shoal.training.pytorch.program import Program, name_of

    program = Program.of(train_func, args, kwargs or {})
    # Wrong fields are told before anything is written.
    named = {"name": name_of(program.target), "arguments": _digest(args, kwargs or {})}
    spec = FunctionJobSpec.parse({**named, **fields, "program": _NOT_STORED})
    stored = code_store.store(program.dumps(), spec.run_config.artifact_location)
    return spec.model_copy(update={"program": stored})


def _digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Of plain data: other arguments make another fingerprint. Pickles of the rest differ from call to call."""
    try:
        return ids.digest([list(args), dict(kwargs)])
    except (TypeError, ValueError):
        return None
