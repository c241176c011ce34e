"""Tables that read well in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned; the first holds words, the others figures."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])} |"

    rule = f"| {' | '.join(['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])])} |"
    return "\n".join([line(head), rule, *map(line, rows)])
