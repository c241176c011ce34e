"""Make the pictures of README.md and the guides: ``python -m tests.support.pictures`` (`make pictures`)."""

from __future__ import annotations

from tests.support import ROOT

FOLDER = ROOT / "docs" / "images"

PICTURES = {
    "architecture": ("architecture.svg",),
    "page": (
        "busy-overview-light.png",
        "busy-overview-phone.png",
        "busy-jobs-flights-2026-11-23-dark.png",
        "broken-overview-dark.png",
        "broken-pools-retrain-light.png",
        "idle-models-flight-delays-light.png",
    ),
    "airflow": ("make-run.svg", "airflow-run.png"),
    "prefect": ("prefect-run.png",),
}
"""All files in `FOLDER`, by the name of the program part that makes them."""
