"""The plan of a training: for several sizes of a pool, whether it fits into the memory of the nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from shoal.training.sizing.node_memory import NodeMemory
from shoal.training.sizing.worker_memory import mib

Verdict = Literal["fits", "disk", "tight", "no"]
"""``fits`` with a reserve of 15 %; ``disk`` with the same reserve, if XGBoost keeps the quantised rows on disk;
``tight`` without the reserve, if possible on disk; ``no`` if the training does not fit."""

MARGIN = 1.15
"""Factor of the predicted memory that has to be free, because a prediction may be up to 15 % too low."""


def verdict_of(need: int, room: int) -> Verdict:
    """Return whether a worker that needs some bytes fits into the bytes that it can have, without its rows on disk."""
    return "fits" if MARGIN * need <= room else "tight" if need <= room else "no"


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """Prediction for one number of nodes.

    Args:
        nodes: Number of nodes.
        workers: Number of workers.
        rows: Rows of the largest worker.
        peak_bytes: Predicted peak of the memory of each worker.
        room_bytes: Memory that each worker can have.
        verdict: Whether the training fits; see `Verdict`.
        terms: Terms of the peak in bytes, the largest first.
        disk_bytes: Size of the quantised rows on disk of each worker; 0 if they are in memory.
        advice: What helps if the verdict is ``no``; empty otherwise.
    """

    nodes: int
    workers: int
    rows: int
    peak_bytes: int
    room_bytes: int
    verdict: Verdict
    terms: dict[str, int]
    disk_bytes: int = 0
    advice: str = ""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Predicted memory of a training on several sizes of a pool.

    Args:
        framework: The library.
        rows: Number of training rows.
        features: Number of feature columns.
        node: Memory of a node.
        sizes: Predictions, by the number of nodes.
        scale: Factor of the predicted memory above the idle process, from earlier trainings of the model.
        note: Sentence about what the prediction does not contain.
    """

    framework: str
    rows: int
    features: int
    node: NodeMemory
    sizes: tuple[PlannedSize, ...]
    scale: float = 1.0
    note: str = ""

    @property
    def chosen(self) -> PlannedSize | None:
        """Smallest size on which the training fits with a reserve; else the smallest one on which XGBoost trains from
        disk; None if it fits on no size."""
        by_verdict = {size.verdict: size for size in reversed(self.sizes)}
        return by_verdict.get("fits") or by_verdict.get("disk")

    def reasoning(self) -> str:
        """Return one sentence: the chosen size and why."""
        what = f"{self.framework} on {self.rows:,} rows x {self.features:,} features"
        if self.scale != 1.0:
            what += f" (predictions x {self.scale:.2f}, as the model's last jobs measured)"
        size = self.chosen
        if size is None:
            last = self.sizes[-1]
            return (
                f"{what} fits on no size up to {last.nodes} node(s): a worker needs {mib(last.peak_bytes)} "
                f"({shown(last.terms)}) and can have {mib(last.room_bytes)}; {last.advice}{self.note}"
            )
        disk = f", with {mib(size.disk_bytes)} of quantised rows on its disk" if size.verdict == "disk" else ""
        return (
            f"{what} needs {size.nodes} node(s): each of {size.workers} worker(s) needs {mib(size.peak_bytes)}{disk} "
            f"({shown(size.terms)}) and can have {mib(size.room_bytes)} ({self.node.source}){self.note}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        chosen = self.chosen
        return {**asdict(self), "chosen": None if chosen is None else chosen.nodes, "reasoning": self.reasoning()}


def shown(terms: dict[str, int]) -> str:
    """Return the largest terms as text."""
    return ", ".join(f"{name} {mib(size)}" for name, size in [*terms.items()][:3])


def tried_sizes(most_nodes: int) -> list[int]:
    """Return 1, 2, 4 … nodes up to a largest number, and this number."""
    return sorted({*(2**i for i in range(most_nodes.bit_length())), most_nodes})
