"""Turns of a benchmark's sides: each warmed, then measured with only itself up; a busy machine slows all alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tests.benchmarks.process_tree import PeakMemory, tree
from tests.benchmarks.side import Side, SideError

T = TypeVar("T")


@dataclass
class Taken(Generic[T]):
    """What one side took.

    Attributes:
        turns: What each turn gave.
        peak_bytes: The highest memory of its process tree.
        failure: Why there is no more.
    """

    turns: list[T] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str | None = None


def take_turns(
    sides: Mapping[str, Callable[[], Side]], warming: Any, request: Any, repeat: int, once: Collection[str] = ()
) -> dict[str, Taken[Any]]:
    """Measure every side.

    Args:
        sides: Opens each.
        warming: What it is asked first, unmeasured.
        request: What it is asked then.
        repeat: Turns.
        once: Those that have one turn only.
    """
    taken: dict[str, Taken[Any]] = {name: Taken() for name in sides}
    for turn in range(repeat):
        for name, so_far in taken.items():
            if so_far.failure or (turn and name in once):
                continue
            try:
                _turn(sides[name](), warming, request, so_far)
            except SideError as error:
                so_far.failure = str(error)
    return taken


def _turn(side: Side, warming: Any, request: Any, taken: Taken[Any]) -> None:
    try:
        side.ask(warming)
        with PeakMemory(lambda: tree(side.pid)) as peak:
            taken.turns.append(side.ask(request))
        taken.peak_bytes = max(taken.peak_bytes, peak.bytes)
    finally:
        side.close()
