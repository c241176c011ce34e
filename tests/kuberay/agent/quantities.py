"""Amounts of CPU and memory as Kubernetes writes them."""

from __future__ import annotations

import math
from typing import Any

_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def number(quantity: str) -> float:
    """The number: 0.2 of "200m", 1048576.0 of "1Mi"."""
    for length in (2, 1):
        if (suffix := quantity[-length:]) in _SUFFIXES:
            return float(quantity[:-length]) * _SUFFIXES[suffix]
    return float(quantity)


def memory_limit(container: dict[str, Any]) -> int | None:
    """The bytes that a container may use at most; None if there is no limit."""
    limit = (container.get("resources", {}).get("limits") or {}).get("memory")
    return int(number(str(limit))) if limit else None


def resource_value(container: dict[str, Any], reference: dict[str, Any]) -> str:
    """The value of a resourceFieldRef, such as limits.cpu: rounded up, in units of the divisor."""
    which, _, name = reference["resource"].partition(".")
    resources = container.get("resources", {})
    amount = (resources.get(which) or {}).get(name) or (resources.get("limits") or {}).get(name) or "0"
    divisor = number(str(reference.get("divisor", "1"))) or 1.0
    return str(math.ceil(number(str(amount)) / divisor))
