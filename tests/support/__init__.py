"""What tests share beside fixtures: helpers, stand-ins, and programs that tests start."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of the repository."""
