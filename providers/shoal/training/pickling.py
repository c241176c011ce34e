"""Pickle the user's functions and objects together with the code of modules that are not installed on the nodes, and
compute the digest of such code, which is the same in every process."""

from __future__ import annotations

import copyreg
import dis
import io
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from types import CellType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.lazy_imports import cloudpickle

# All threads of the process share cloudpickle's registry of modules that are pickled by value, so only one thread at a
# time may change it.
_registering = threading.Lock()


@dataclass(frozen=True, slots=True)
class Pickled:
    """Pickled object. If a message contains a `Pickled`, the receiver of the message gets the object itself.

    Args:
        content: Result of :func:`pickled`.
    """

    content: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self.content,)


def pickled(value: Any, what: str) -> bytes:
    """Pickle functions and objects, including the variables of their closures.

    Code that is not installed in the environment (a script, a DAG file, a notebook, and the modules that these use) is
    pickled too, because the nodes cannot import such code. It does not matter where in `value` the code is used: in a
    callback object of the library, in a bound method or in the variables of a function.

    Returns:
        The pickled bytes.

    Raises:
        InvalidArgumentError: The value contains an object that cannot be pickled.
    """
    try:
        with _registering:
            try:
                return _dump(value, (type, FunctionType, ModuleType))
            except Exception:
                # A module that a function uses as a whole may contain objects that cannot be pickled. The nodes may be
                # able to import the module, so it is pickled by its name.
                return _dump(value, (type, FunctionType))
    except Exception as error:
        raise InvalidArgumentError(
            f"{what} cannot be sent to the pool: {error}. Create objects that cannot be pickled, such as locks and "
            "connections, inside the function"
        ) from error


def _dump(value: Any, by_value: tuple[type, ...]) -> bytes:
    """Pickle an object."""
    with _registered() as register:

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, found: Any) -> Any:
                # Pickle calls this method for each object, just before cloudpickle asks its registry.
                if isinstance(found, by_value):
                    register(found.__name__ if isinstance(found, ModuleType) else found.__module__)
                return super().reducer_override(found)

        with io.BytesIO() as file:
            Pickler(file).dump(value)
            return file.getvalue()


@contextmanager
def _registered() -> Iterator[Any]:
    """Yield a function that makes cloudpickle pickle a module by value, until the ``with`` block ends."""
    seen = set(cloudpickle.list_registry_pickle_by_value())

    def register(name: Any) -> None:
        if name in seen:
            return
        seen.add(name)
        module = sys.modules.get(name)
        if module is not None and not is_installed(module):
            cloudpickle.register_pickle_by_value(module)
            mine.callback(cloudpickle.unregister_pickle_by_value, module)

    with ExitStack() as mine:
        yield register


def is_installed(module: ModuleType) -> bool:
    """Return whether the nodes have a module, so that its functions and classes are sent by their names."""
    file = getattr(module, "__file__", None)
    # Modules without a file need no registration with cloudpickle. They are either built into Python, so every node has
    # them, or they are the main module of an interactive session, which cloudpickle always pickles.
    if file is None or module.__name__.split(".")[0] == "shoal":
        return True
    if {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return True
    return any(Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))


_PLAIN = (NoneType, bool, int, float, complex, str, bytes, EllipsisType)

_GLOBAL_NAMES = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
"""Instructions of Python's bytecode that read a global variable."""


def code_digest(value: Any, named: Callable[[Any], str | None] = lambda value: None) -> str:
    """Compute the digest of an object, such as a function with its arguments.

    The digest of a function that is sent by value (see :mod:`shoal.training.pickling`) depends on its bytecode, its
    defaults, and the variables of its closure and of its module that it uses, and so on for the functions and classes
    among them. It does not depend on comments, on line numbers and on the file. Of code that is installed on the nodes,
    only the name counts.

    The pickled bytes are no such digest: they contain the path of the file, and the order of sets and the ids of
    classes, which differ between processes.

    Args:
        value: The object.
        named: Function that returns a text for an object of which only this text counts, and None for all others.

    Returns:
        A SHA-256 as hexadecimal text.
    """
    return _Walk(named).digest(value)


class _Walk:
    """Walk through an object and the objects in it."""

    def __init__(self, named: Callable[[Any], str | None]) -> None:
        self._named = named
        # The objects are kept with their digests, so that no other object gets the id of one of them.
        self._seen: dict[int, tuple[Any, str]] = {}

    def digest(self, value: Any) -> str:
        kind = type(value).__qualname__
        if isinstance(value, _PLAIN):
            return _hash(kind, repr(value))
        if (name := self._named(value)) is not None:
            return _hash("named", name)
        if id(value) not in self._seen:
            self._seen[id(value)] = value, _hash("contains itself")
            self._seen[id(value)] = value, _hash(kind, *self._parts(value))
        return self._seen[id(value)][1]

    def _all(self, values: Iterable[Any]) -> Iterator[str]:
        return map(self.digest, values)

    def _parts(self, value: Any) -> Iterable[str]:
        match value:
            case list() | tuple():
                return self._all(value)
            case set() | frozenset():
                return sorted(self._all(value))
            case Mapping():
                return sorted(_hash(*self._all(item)) for item in value.items())
            case CodeType():
                return self._code(value)
            case ModuleType():
                return [value.__name__ if is_installed(value) else "a module that is sent"]
            case FunctionType() | type() if _is_named(value):
                return [value.__module__, value.__qualname__]
            case FunctionType():
                return self._function(value)
            case type():
                return self._class(value)
            case MethodType():
                return self._all((value.__func__, value.__self__))
            case staticmethod() | classmethod():
                return [self.digest(value.__func__)]
            case property():
                return self._all((value.fget, value.fset, value.fdel))
            case CellType():
                return self._all(_content(value))
            case _:
                return self._object(value)

    def _code(self, code: CodeType) -> Iterator[str]:
        yield repr((code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount, code.co_posonlyargcount))
        yield repr((code.co_kwonlyargcount, code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars))
        yield from self._all(code.co_consts)

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield self.digest(function.__code__)
        yield from self._all((function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function)))
        for name, value in _globals(function):
            yield name
            yield self.digest(value)

    def _class(self, found: type) -> Iterator[str]:
        yield found.__qualname__
        yield from self._all(found.__bases__)
        for name, value in sorted(vars(found).items()):
            # Of the attributes with such names, Python and libraries make some anew in each process.
            if not name.startswith("_abc_") and (not name.startswith("__") or isinstance(value, FunctionType)):
                yield name
                yield self.digest(value)

    def _object(self, value: Any) -> Iterator[str]:
        """Yield the digests of the parts into which `pickle` would take an object apart."""
        yield self.digest(type(value))
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # the object cannot be pickled
            return
        if isinstance(parts, str):
            yield parts
            return
        for part in parts:
            yield self.digest(list(part) if isinstance(part, Iterator) else part)


def _hash(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the variable has no value yet
        return ()


def _is_named(found: FunctionType | type) -> bool:
    """Return whether a function or class is sent by its name."""
    module = sys.modules.get(found.__module__ or "")
    if module is None or module.__name__ == "__main__" or not is_installed(module):
        return False
    try:
        return bool(attrgetter(found.__qualname__)(module) is found)
    except AttributeError:  # it was made in a function
        return False


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of its module that a function uses, and those that it uses of other modules that are sent."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    read = {each.argval for code in codes for each in dis.get_instructions(code) if each.opname in _GLOBAL_NAMES}
    for name in sorted(read & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and not is_installed(value):
            attributes = {attribute for code in codes for attribute in code.co_names} & vars(value).keys()
            yield from ((f"{name}.{attribute}", getattr(value, attribute)) for attribute in sorted(attributes))
