"""The reference of the command line, by Typer's own generator."""

from __future__ import annotations

import re
import subprocess
import sys

_COMMAND = [sys.executable, "-m", "typer", "shoal.cli", "utils", "docs", "--name", "shoal", "--title", "Commands"]


def page() -> str:
    """Return the page of all commands."""
    found = subprocess.run(_COMMAND, check=True, capture_output=True, text=True).stdout
    return re.sub(r"\n{3,}", "\n\n", found).replace("```console", "```text").strip() + "\n"
