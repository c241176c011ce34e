"""A worker as on GPUs, on a machine without GPUs: torch says that it has one, and gloo runs instead of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch


def as_on_gpus(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a worker, with gloo in place of NCCL, which can neither run nor be registered on CPUs."""
    import torch

    start = torch.distributed.init_process_group

    def start_with_gloo(backend: str, **options: Any) -> None:
        start("gloo" if backend == "nccl" else backend, **options)

    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.distributed, "init_process_group", start_with_gloo),
    ):
        return function(*args, **kwargs)
