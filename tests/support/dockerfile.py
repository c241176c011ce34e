"""The stages of the images' Dockerfile, and what each of them installs."""

from __future__ import annotations

import re
import shlex

from tests.support import ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def installs(stage: str) -> list[list[str]]:
    """Return the arguments of `docker/bin/install` in a stage: the file of pins, the extras, the packages.

    Of several, the second is what the stage installs if the first fails.
    """
    lines = re.findall(r"install ((?:dev|stack|prefect-newest) .*?)(?: \\)?\n", stage)
    return [shlex.split(line) for line in lines]
