"""Create samplers and pruners of Optuna by their names, and seed a sampler for each trial."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from shoal.kinds.search.spec import Range

if TYPE_CHECKING:
    import optuna

_MOST_DEPTH = 3
"""Levels of samplers inside samplers, such as TPE's sampler of the first trials."""


def sampler_named(name: str | None) -> optuna.samplers.BaseSampler:
    """Return the sampler that a spec names; by default TPE. The trials of a grid are enqueued, so it needs none."""
    from optuna import samplers

    made = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "grid": samplers.RandomSampler,
        "gp": samplers.GPSampler,
        "cmaes": samplers.CmaEsSampler,
        "qmc": samplers.QMCSampler,
    }
    sampler: optuna.samplers.BaseSampler = made[name or "tpe"](seed=0)
    return sampler


def pruner_named(name: str | None) -> optuna.pruners.BasePruner:
    """Return the pruner that a spec names; by default the median pruner, as in Optuna."""
    from optuna import pruners

    made = {
        "median": pruners.MedianPruner,
        "halving": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
        "none": pruners.NopPruner,
    }
    pruner: optuna.pruners.BasePruner = made[name or "median"]()
    return pruner


def seeded(sampler: optuna.samplers.BaseSampler, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Return a copy of a sampler whose random numbers depend only on the seed of the study and the number of the trial.

    So a search that continues suggests the same parameters as one that was never interrupted.
    """
    digest = sha256(f"{seed}/{number}".encode()).digest()
    fresh = copy.deepcopy(sampler)
    _seed(fresh, int.from_bytes(digest[:4], "big"), _MOST_DEPTH)
    return fresh


def _seed(sampler: Any, seed: int, depth: int) -> None:
    from optuna.samplers import BaseSampler

    for place, value in enumerate(vars(sampler).values()):
        if isinstance(value, BaseSampler) and depth:
            _seed(value, seed + place + 1, depth - 1)
        # `reseed_rng` takes no seed. All samplers of Optuna keep their random numbers in such an object.
        elif hasattr(value, "rng") and hasattr(value.rng, "seed"):
            value.rng.seed((seed + place) % 2**32)


def grid(space: Mapping[str, Range]) -> list[dict[str, Any]]:
    """Return the parameters of all trials of a search on a grid."""
    values = [each.grid() for each in space.values()]
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]
