"""Seconds of each test file and of the slowest tests, from what ``PYTEST_ADDOPTS=--durations=0 make test`` printed.

``python -m tests.benchmarks.durations < OUTPUT > tests/benchmarks/durations.txt``
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

from tests.benchmarks.__main__ import machine

_LINE = re.compile(r"([\d.]+)s (?:setup|call|teardown) +((\S+?)::.*)")
_SLOWEST = 50


def report(lines: Iterable[str]) -> str:
    """The table, the slowest first."""
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for seconds, test, file in (found.groups() for line in lines if (found := _LINE.search(line))):
        files[file] += float(seconds)
        tests[test.strip()] += float(seconds)
    head = f"{machine()}\n{sum(files.values()):,.0f} s in {len(files)} files; several lanes ran at a time"
    parts = (
        [f"{seconds:8.1f}  {name}" for name, seconds in found]
        for found in (files.most_common(), tests.most_common(_SLOWEST))
    )
    return "\n\n".join([head, *("\n".join(part) for part in parts)])


if __name__ == "__main__":
    print(report(sys.stdin))
