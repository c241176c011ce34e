"""Compute the digest of a function's code and of the values that it uses. The digest is the same in every process."""

from __future__ import annotations

import copyreg
import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from operator import attrgetter
from types import CellType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from shoal.training.pickling import is_installed

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
