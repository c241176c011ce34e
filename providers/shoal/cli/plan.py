"""Command `shoal plan`, which predicts how many nodes of a pool a training needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import output
from shoal.cli.jobs import read_spec

if TYPE_CHECKING:
    from shoal.training.sizing.plan import PlannedSize


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|PATH",
            help="File with the job spec as JSON or YAML; - reads stdin. Or a path of Parquet files, to train with "
            "XGBoost on their numeric columns.",
        ),
    ],
    pool_name: Annotated[
        str | None, typer.Option("--pool", metavar="URI|NAME", help="Pool to plan for. Default: the pool in the spec.")
    ] = None,
    memory_per_node: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT", help="Memory of each node for workers, such as 16Gi. Default: the pool's."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of the training set, if it is sql, csv or json: only its first rows are read."),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Predict the memory of a training on 1, 2, 4 … nodes of a pool, and the number of nodes that it needs.

    Only the footers of the files are read, and the first rows of some if there are texts. No node is started.
    """
    from shoal.kinds.training.pool_plan import plan as plan_of
    from shoal.training.host.imports import NOT_NEEDED, hidden

    is_spec = source == "-" or Path(source).suffix in (".json", ".yaml", ".yml")
    spec = read_spec(source) if is_spec else source
    # The check of the parameters imports the library, whose import of scikit-learn takes longer than the whole plan.
    with hidden(NOT_NEEDED):
        found = plan_of(spec, pool_name, memory_per_node=memory_per_node, rows=rows)
    columns = ("NODES", "WORKERS", "ROWS EACH", "PEAK OF EACH", "CAN HAVE", "VERDICT", "LARGEST TERMS")
    texts = ["", found.reasoning()]
    if found.node.is_shared and len(found.sizes) > 1:
        texts.append("All nodes of this pool share one machine: more nodes add no memory.")
    sizes = output.table(columns, [_row(size) for size in found.sizes])
    output.show_result(found.to_dict(), sizes, *texts, as_json=as_json)


def _row(size: PlannedSize) -> tuple[object, ...]:
    from shoal.training.sizing.plan import shown
    from shoal.training.sizing.worker_memory import mib

    disk = f" ({mib(size.disk_bytes)})" if size.disk_bytes else ""
    peak, room = mib(size.peak_bytes), mib(size.room_bytes)
    return size.nodes, size.workers, f"{size.rows:,}", peak, room, size.verdict + disk, shown(size.terms)
