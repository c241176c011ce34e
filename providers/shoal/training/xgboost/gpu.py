"""Find out whether the installed XGBoost can train on a GPU."""

from __future__ import annotations

import json

WITHOUT_CUDA = (
    "the installed XGBoost has no CUDA, like the wheel xgboost-cpu. For GPUs, run `pip uninstall xgboost-cpu xgboost` "
    'and then `pip install "shoal[xgboost-gpu]"` on each node'
)
"""Reason why an XGBoost without CUDA cannot use GPUs, and what to do."""


def has_cuda() -> bool:
    """Return whether the installed XGBoost was built with CUDA."""
    import xgboost

    return bool(xgboost.build_info().get("USE_CUDA"))


def gpu_problem() -> str | None:
    """Return why XGBoost cannot train on a GPU in this process, and what to do; None if it can."""
    import numpy as np
    import xgboost

    if not has_cuda():
        return f"{WITHOUT_CUDA}; to train on CPUs, set use_gpu=False"
    # If XGBoost finds no GPU, it changes the device in its configuration to "cpu", and only prints a warning.
    rows = xgboost.DMatrix(np.zeros((2, 1), np.float32), label=[0, 1], nthread=1)
    config = json.loads(xgboost.Booster({"device": "cuda", "verbosity": 0}, [rows]).save_config())
    if config["learner"]["generic_param"]["device"] != "cpu":
        return None
    return (
        "XGBoost finds no NVIDIA GPU that it can use: compare the driver that `nvidia-smi` shows with XGBoost's "
        "version of CUDA, and CUDA_VISIBLE_DEVICES with the GPUs of the node; to train on CPUs, set use_gpu=False"
    )
