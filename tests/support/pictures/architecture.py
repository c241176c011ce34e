"""Draw the parts of shoal as SVG, from lists of boxes and arrows."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from tests.support.pictures import FOLDER, PICTURES

_WIDTH, _HEIGHT = 1000, 588


class Box(NamedTuple):
    """A part of shoal, or a group of parts; coordinates in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "part"


class Arrow(NamedTuple):
    """An arrow along the points `path`, with a text to the right of its last part, which is vertical."""

    path: tuple[tuple[int, int], ...]
    text: str = ""
    both_ways: bool = False


BOXES = (
    Box(20, 20, 220, 74, "Airflow", ("DAGs: operators, sensors,", "@task.distributed"), "user"),
    Box(260, 20, 220, 74, "Prefect", ("flows: tasks, hooks,", "pool_lease"), "user"),
    Box(500, 20, 220, 74, "Python, shell", ("estimators, ComputePool,", "the command shoal"), "user"),
    Box(760, 20, 220, 74, "The page", ("shoal ui, and a plugin", "inside Airflow"), "user"),
    Box(20, 152, 700, 112, "shoal", kind="group"),
    Box(40, 184, 320, 62, "Pools", ("sizes, leases, operations that roll back",)),
    Box(380, 184, 320, 62, "Jobs", ("specs, queue, attempts, retries",)),
    Box(760, 152, 220, 112, "Store", ("all state, in SQLite or", "PostgreSQL"), "state"),
    Box(20, 344, 700, 124, "A pool: processes of this machine, a Ray cluster, or KubeRay", kind="group"),
    Box(40, 376, 190, 74, "Worker", ("reads some of the rows,", "trains with the others")),
    Box(270, 376, 190, 74, "Worker", ("reads some of the rows,", "trains with the others")),
    Box(500, 376, 200, 74, "Driver of a job", ("on the head: starts and", "follows the workers")),
    Box(760, 376, 220, 92, "MLflow", ("runs, metrics, registered", "versions, the champion"), "outside"),
    Box(40, 516, 420, 56, "Data", ("Parquet, Delta, Iceberg, CSV, SQL, DataFrames",), "outside"),
)

ARROWS = (
    Arrow(((130, 94), (130, 152)), "scale, lease, submit"),
    Arrow(((370, 94), (370, 152)), "scale, lease, submit"),
    Arrow(((610, 94), (610, 152)), "fit, scale, submit"),
    Arrow(((870, 94), (870, 152)), "read, act", both_ways=True),
    Arrow(((720, 208), (760, 208)), both_ways=True),
    Arrow(((140, 264), (140, 344)), "start and end nodes"),
    Arrow(((540, 264), (540, 344)), "send attempts"),
    Arrow(((230, 413), (270, 413)), both_ways=True),
    Arrow(((460, 413), (500, 413)), both_ways=True),
    Arrow(((140, 516), (140, 450)), "row groups"),
    Arrow(((360, 516), (360, 450)), "row groups"),
    Arrow(((700, 394), (740, 394), (740, 312), (790, 312), (790, 264)), "heartbeats, results"),
    Arrow(((700, 432), (760, 432))),
)

_STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 14px; fill: #33414f }
.title { font-size: 16px; font-weight: 600; fill: #14202b }
rect { rx: 8px; stroke-width: 1.5px }
.background { fill: #ffffff; rx: 0 }
.user { fill: #e8f0fa; stroke: #7ea6d8 }
.group { fill: #f5f7f9; stroke: #c3ccd5 }
.part { fill: #ffffff; stroke: #145a9c }
.state { fill: #e6f4ea; stroke: #6fae84 }
.outside { fill: #fdf3e0; stroke: #d9ab55 }
path { fill: none; stroke: #526373; stroke-width: 1.5px }
marker path { fill: #526373; stroke: none }
"""


def drawing() -> str:
    """Return the picture."""
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg">',
        f"<style>{_STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"',
        ' orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker>',
        f'<rect class="background" width="{_WIDTH}" height="{_HEIGHT}"/>',
        *map(_box, BOXES),
        *map(_arrow, ARROWS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(box: Box) -> str:
    shape = f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}"/>'
    title = f'<text class="title" x="{box.x + 14}" y="{box.y + 24}">{escape(box.title)}</text>'
    lines = [
        f'<text x="{box.x + 14}" y="{box.y + 46 + 18 * number}">{escape(line)}</text>'
        for number, line in enumerate(box.lines)
    ]
    return "\n".join([shape, title, *lines])


def _arrow(arrow: Arrow) -> str:
    points = " ".join(f"{x} {y}" for x, y in arrow.path)
    start = 'marker-start="url(#tip)" ' if arrow.both_ways else ""
    line = f'<path d="M{points}" {start}marker-end="url(#tip)"/>'
    (x, y), (_, end) = arrow.path[-2:]
    text = f'<text x="{x + 9}" y="{(y + end) // 2 + 5}">{escape(arrow.text)}</text>'
    return "\n".join([line, text] if arrow.text else [line])


def make() -> None:
    """Save the picture."""
    (name,) = PICTURES["architecture"]
    (FOLDER / name).write_text(drawing())
