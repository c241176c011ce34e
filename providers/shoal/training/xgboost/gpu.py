"""Check the device that the user set, and whether the installed XGBoost can train on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import InvalidArgumentError

WITHOUT_CUDA = (
    "the installed XGBoost has no CUDA, like the wheel xgboost-cpu. For GPUs, run `pip uninstall xgboost-cpu xgboost` "
    'and then `pip install "shoal[xgboost-gpu]"` on each node'
)
"""Message for users whose XGBoost was built without CUDA and therefore cannot use GPUs."""


def device_of(params: Mapping[str, Any]) -> str | None:
    """Return the parameter `device`, or None if `params` do not contain it.

    Raises:
        InvalidArgumentError: The device contains the number of a GPU. This is not allowed, because Ray assigns the GPUs
            to the workers.
    """
    device = params.get("device")
    if device is None:
        return None
    if ":" in str(device):
        raise InvalidArgumentError(
            f'device="{device}" selects one GPU by number, but Ray assigns a GPU to each worker: use device="cuda"'
        )
    return str(device)


def has_cuda() -> bool:
    """Return whether the installed XGBoost was built with CUDA."""
    import xgboost

    return bool(xgboost.build_info().get("USE_CUDA"))


def gpu_problem() -> str | None:
    """Return the reason why XGBoost cannot train on a GPU in this process, with advice for the user; None if GPUs
    work."""
    import numpy as np
    import xgboost

    if not has_cuda():
        return f"{WITHOUT_CUDA}; to train on CPUs, set use_gpu=False"
    # If XGBoost finds no GPU, it raises no error: it prints a warning and sets the device in its configuration to
    # "cpu".
    rows = xgboost.DMatrix(np.zeros((2, 1), np.float32), label=[0, 1], nthread=1)
    config = json.loads(xgboost.Booster({"device": "cuda", "verbosity": 0}, [rows]).save_config())
    if config["learner"]["generic_param"]["device"] != "cpu":
        return None
    return (
        "XGBoost finds no NVIDIA GPU that it can use: check that the driver version in the output of `nvidia-smi` "
        "supports XGBoost's CUDA version, and that CUDA_VISIBLE_DEVICES names GPUs of the node. To train on CPUs, set "
        "use_gpu=False"
    )
