"""Build a job spec from the arguments of a workflow engine's task."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from shoal.boosting_libraries import loaded
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError, shown
from shoal.jobs import ids, shipped_code
from shoal.jobs.kind import spec_class
from shoal.jobs.scheduling import refuse_too_many_workers, refuse_without_ray
from shoal.jobs.spec import CODE_FIELDS, NOT_STORED, AnyJobSpec, is_spec
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.kinds.partitions.spec import PARTITIONS, PartitionsJobSpec
from shoal.pool.selection import pool_without_folder
from shoal.pool.spec import PoolSpec
from shoal.training.boosting.params import UserCode
from shoal.training.gang.placement import GangShape
from shoal.training.host.imports import hidden
from shoal.training.pickling import code_digest
from shoal.training.pytorch.program import FRAMEWORK, Program, TrainFunc, check_train_func, is_name, name_of


def spec_of(
    given: AnyJobSpec | Mapping[str, Any] | None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> AnyJobSpec:
    """Build the job spec from a task's arguments.

    A `train_func` that is a function object or a script is stored by value, together with its arguments.

    Args:
        given: A spec, or the fields of a spec. With `train_func`: the fields that do not describe the function.
        framework: Framework that trains, unless the fields name one.
        train_func: The function, its import name ``module:name``, or the path of a script.
        args: Positional arguments of the function; the command line of a script.
        kwargs: Keyword arguments of the function.

    Raises:
        InvalidArgumentError: Fields are wrong, or the function or its arguments cannot be pickled; the message names
            them.
    """
    check_train_func(train_func, args, kwargs, framework=framework, fields=given)
    if is_spec(given):
        return given
    fields = _fields(given, framework, train_func, args, kwargs)
    if train_func is None or is_name(train_func):
        return _parsed(spec_class(fields), fields)
    program = Program.of(train_func, args, kwargs or {})
    # The fields are parsed before the code is stored, so that wrong fields cause an error before a file is written.
    named = {"name": name_of(program.target), "arguments": _digest(args, kwargs or {})}
    spec = _parsed(FunctionJobSpec, {**named, **fields})
    pool_name = spec.run_config.pool_name
    stored = shipped_code.store(program.dumps(lambda folder: pool_without_folder(folder, pool_name)))
    return spec.model_copy(update={"program": stored})


def models_spec_of(
    fields: Mapping[str, Any],
    *,
    function: Callable[..., Any] | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> PartitionsJobSpec:
    """Build the spec of a job that trains a model for each partition of a table, from a task's arguments.

    Args:
        fields: Fields of the spec, such as ``dataset``, ``by`` and ``estimator``.
        function: Function that returns the model of a partition, which is stored by value, or its import name
            ``module:name``. None: the fields name an estimator or a function.
        kwargs: Keyword arguments of the function.

    Raises:
        InvalidArgumentError: Fields are wrong, or the function cannot be pickled.
    """
    # The fields are parsed before the code is stored, so that wrong fields cause an error before a file is written.
    spec = cast("PartitionsJobSpec", _parsed(PartitionsJobSpec, fields_of_models(fields, function, kwargs)))
    if function is None or isinstance(function, str):
        return spec
    from shoal.kinds.partitions.call import program_of
    from shoal.kinds.partitions.partition_messages import SavedModel

    saved = SavedModel(partial(function, **kwargs) if kwargs else function)
    program = program_of(saved)
    return spec.model_copy(update={"program": shipped_code.store(program.content), "code_digest": program.digest})


def fields_of_models(
    fields: Mapping[str, Any], function: Callable[..., Any] | str | None, kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of the spec that the arguments of `models_spec_of` describe.

    A function gets a placeholder in the field `program`, because its code is not stored yet.
    """
    from shoal.training.pytorch.program import check_runnable

    found = {**fields, "framework": PARTITIONS}
    if function is None:
        if kwargs:
            raise InvalidArgumentError("the arguments of a function are given, but no function: set the function")
        return found
    if isinstance(function, str):
        return {**found, "function": function, "kwargs": dict(kwargs or {})}
    check_runnable(function, "function")
    return {"name": name_of(function), **found, "program": NOT_STORED}


def code_of(
    spec: AnyJobSpec,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the digest of the user's code that a job is sent with, which the spec's fingerprint does not contain.

    Args:
        spec: Spec of the job.
        train_func: The function from which `spec_of` has built the spec, its name, or the path of a script.
        args: Positional arguments of the function; the command line of a script.
        kwargs: Keyword arguments of the function.

    Returns:
        The digest (see :func:`shoal.training.pickling.code_digest`); None if no code is sent.
    """
    if train_func is not None and not is_name(train_func):
        return code_digest(Program.of(train_func, args, kwargs or {}))
    if digest := getattr(spec, "code_digest", None):
        return str(digest)
    stored = (getattr(spec, name, None) for name in CODE_FIELDS)
    # A file's name is the digest of the pickled code.
    return next((path.rpartition("/")[2] for path in stored if path), None)


def check_spec(
    given: AnyJobSpec | Mapping[str, Any] | None,
    is_known: Callable[[Any], bool],
    *,
    pool: PoolSpec | None = None,
    **others: Any,
) -> AnyJobSpec | None:
    """Check the arguments of `spec_of` that are already known, for example while an engine loads a workflow.

    The function is neither called nor pickled, and nothing is stored.

    Args:
        given: A spec, or the fields of a spec.
        is_known: Function that returns False for a value that contains a placeholder, such as a template, at any depth.
        pool: Pool on which the job will run, with its largest size; None: not known yet.
        others: The other arguments of `spec_of`.

    Returns:
        The spec, without the code of a function; None if not all fields are known.

    Raises:
        InvalidArgumentError: A field is unknown or missing, or a known value is wrong, and the message names it; or the
            job can never run on the pool, or its driver would refuse it before it reads rows.
    """
    spec, of_workers = None, None
    if is_spec(given):
        spec = of_workers = given
    else:
        fields = _fields(given, **others)
        if not is_known(fields.get("framework")):
            return None
        if is_known(fields):
            spec = of_workers = spec_class(fields).parse(fields)
        else:
            spec_class(fields).check(fields, is_known)
            of_workers = _workers(fields, is_known)
    if pool is not None and of_workers is not None:
        refuse_without_ray(of_workers, pool)
        refuse_too_many_workers(of_workers, pool)
    _refuse_contradictions(spec or _with_texts(fields), is_known)
    return spec


def _with_texts(fields: Mapping[str, Any]) -> AnyJobSpec | None:
    """Return a spec whose templates stay as texts; None if a field that has a template is not a text."""
    try:
        return spec_class(fields).parse(fields)
    except InvalidArgumentError:
        return None


def _refuse_contradictions(spec: AnyJobSpec | None, is_known: Callable[[Any], bool]) -> None:
    """Make those checks of a job's driver that need no rows. The library's own checks are made only where it is
    imported already, because an import takes seconds.

    Raises:
        InvalidArgumentError: The driver would refuse the spec.
    """
    if spec is None:
        return
    register, requests = spec.register_as, [*spec.trainings()]
    functions = [getattr(spec, "dataset", None), getattr(spec, "dataset_map", {}).get("train")]
    trained_on = [*(request.dataset for request in requests), *filter(None, functions)]
    if register is not None and register.overlap == "refuse" and any(map(register.holdout.selects_as, trained_on)):
        raise InvalidArgumentError(
            "register.holdout selects the rows that the model is trained on, so the model's metric would be better "
            'than on new rows: name other rows, or set register.overlap="flag" to compare the models nevertheless'
        )
    for request in requests:
        if is_known(request.params) and getattr(spec, "user_code", None) is None:
            # Only the driver knows how many threads a worker has, and by default how many workers there are.
            threads = next((request.params[name] for name in _THREADS if request.params.get(name)), 1)
            size, library = GangShape(max(1, request.scaling_config.num_workers), threads), loaded(request.framework)
            with suppress(ImportError), hidden([request.framework]):
                library.params(request, size, UserCode())
                if register is not None:
                    from shoal.models.gate import try_challenger

                    try_challenger(register, library.output_of(request.params, custom_objective=False))


_THREADS = ("nthread", "n_jobs", "num_threads", "num_thread", "nthreads")
"""Names under which the libraries take the number of threads."""


def _parsed(kind: type[AnyJobSpec], fields: dict[str, Any]) -> AnyJobSpec:
    """Build a spec from fields that templates may have rendered."""
    try:
        return kind.parse(fields)
    except InvalidArgumentError:
        converted = _with_collections(kind, fields)
        if converted is fields:
            raise
    return kind.parse(converted)


def _with_collections(kind: type[AnyJobSpec], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec with lists and dicts in place of the texts to which templates of lists render, such
    as ``"['a', 'b']"``. The types of the fields decide; a text field keeps its text.
    """
    try:
        kind.model_validate(fields)
    # A validator of a spec raises an InvalidArgumentError for a value that is no text of a list.
    except InvalidArgumentError:
        pass
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            if problem["type"] in ("list_type", "tuple_type", "dict_type", "model_type") and problem["loc"]:
                with suppress(ValueError, SyntaxError, LookupError, TypeError):
                    fields = _replaced(fields, problem["loc"], ast.literal_eval(problem["input"]))
    return fields


def _replaced(fields: Any, location: Sequence[Any], value: Any) -> Any:
    """Return a copy of nested lists and dicts with another value at a location."""
    if not location:
        return value
    copy = dict(fields) if isinstance(fields, Mapping) else list(fields)
    copy[location[0]] = _replaced(copy[location[0]], location[1:], value)
    return copy


_ABOUT_WORKERS = ("framework", "scaling_config", "room_for", "run_config", "params")


def _workers(fields: Mapping[str, Any], is_known: Callable[[Any], bool]) -> AnyJobSpec | None:
    """Return a spec with only those fields that say which workers the job needs; None if one of them is not known."""
    given = {name: fields[name] for name in _ABOUT_WORKERS if name in fields}
    if not is_known(given):
        return None
    kind = spec_class(fields)
    types: dict[str, Any] = {name: kind.model_fields[name].annotation for name in given}
    parsed = {name: TypeAdapter(types[name]).validate_python(value) for name, value in given.items()}
    return kind.model_construct(**{"dataset": DatasetSpec.model_construct(), **parsed})


def label_of(given: AnyJobSpec | Mapping[str, Any] | None, **others: Any) -> str:
    """Return what a job is about (see `AnyJobSpec.label`), before its function is stored.

    Args:
        given: A spec, or the fields of a spec.
        others: The other arguments of `spec_of`.

    Raises:
        InvalidArgumentError: Fields are wrong.
    """
    if is_spec(given):
        return given.label
    fields = _fields(given, **others)
    train_func = others.get("train_func")
    if train_func is not None and not is_name(train_func):
        is_script = isinstance(train_func, str | os.PathLike)
        fields = {"name": os.path.basename(train_func) if is_script else name_of(train_func), **fields}
    return _parsed(spec_class(fields), fields).label


def _fields(
    given: Mapping[str, Any] | None,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of the spec that a task's arguments describe.

    A function or script gets a placeholder in the field `program`, because its code is not stored yet.
    """
    if given is None and train_func is None:
        raise InvalidArgumentError("neither a spec nor a train_func is given: give one of them")
    if not isinstance(given, Mapping | None):
        raise InvalidArgumentError(
            f"spec={shown(given)} is not a spec: give a JobSpec, a FunctionJobSpec, or a dict with the fields of one "
            "of them. Only operators of Airflow read a file, and its name has to end with .json, .yaml or .yml. A "
            "template renders to a text: give the result of an earlier task itself, as in spec=prepare()"
        )
    fields = {**(given or {}), **({"framework": framework} if framework else {})}
    if train_func is None:
        return fields
    fields["framework"] = FRAMEWORK
    if not is_name(train_func):
        return {**fields, "program": NOT_STORED}
    return {**fields, "train_func": train_func, "args": tuple(args), "kwargs": kwargs or {}}


def skipping_if_unchanged(spec: AnyJobSpec, wanted: bool | str | None) -> AnyJobSpec:
    """Return the spec of a task's job with the option `skip_if_unchanged`, which skips a training without new rows.

    Args:
        spec: Spec of the job.
        wanted: Whether to skip a training without new rows; may be a text, because Airflow renders templates to texts.
            None: the spec's ``register.skip_if_unchanged`` decides. If the spec does not set that option, the training
                is skipped only if it registers a boosting model and has no user code.

    Raises:
        InvalidArgumentError: `wanted` is true, but the job cannot be skipped; or `wanted` is neither true nor false.
    """
    register = spec.register_as
    if register is None:
        if wanted is True:
            raise InvalidArgumentError(
                "skip_if_unchanged=True needs register, because the job is compared with the newest registered "
                "version: set register, or leave skip_if_unchanged out"
            )
        return spec
    if wanted is None and register.skip_if_unchanged is None:
        wanted = True if spec.skips_by_default else None
    if wanted is None:
        return spec
    return type(spec).parse({**spec.document(), "register": {**register.model_dump(), "skip_if_unchanged": wanted}})


def _digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the digest of the arguments of the training function.

    If the same job is submitted again, the digest is equal. The result is None if the arguments are not plain data,
    because their pickled bytes may differ between two submissions of the same job.
    """
    try:
        return ids.digest([list(args), dict(kwargs)])
    except (TypeError, ValueError):
        return None
