"""Show Optuna the trials of a search as if no trial had ever been repeated, and a pruner only those that it may know.

So a search gives the same result again, also if its workers or its driver were lost meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.jobs.tuning.trials import NUMBER

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


def study_of(study: optuna.Study, is_known: Callable[[FrozenTrial], bool]) -> optuna.Study:
    """Return a view of a study with some of its trials, in the order of the search's numbers, and with these numbers.

    Optuna's TPE gives newer trials more weight, and Hyperband chooses the bracket of a trial by its number.
    """
    import optuna

    # Hyperband makes a study of its own for each bracket, which reads the storage: so the storage is wrapped.
    storage: Any = _Storage(study._storage, is_known)
    return optuna.Study(study.study_name, storage, study.sampler, study.pruner)


class _Storage:
    """Storage of Optuna with the trials of a view.

    Args:
        storage: The storage, which does everything else.
        is_known: Function that returns whether a trial is listed.
    """

    def __init__(self, storage: Any, is_known: Callable[[FrozenTrial], bool]) -> None:
        self._storage = storage
        self._is_known = is_known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get_all_trials(self, *args: Any, **options: Any) -> list[FrozenTrial]:
        """Return the trials that are listed; the arguments are those of Optuna's storages."""
        found = self._storage.get_all_trials(*args, **options)
        return sorted((_numbered(each) for each in found if self._is_known(each)), key=lambda each: each.number)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial by Optuna's id."""
        return _numbered(self._storage.get_trial(trial_id))

    def get_trial_number_from_id(self, trial_id: int) -> int:
        """Return the number of a trial."""
        return self.get_trial(trial_id).number


def _numbered(trial: FrozenTrial) -> FrozenTrial:
    number = trial.user_attrs.get(NUMBER, trial.number)
    if number == trial.number:
        return trial
    numbered = copy.copy(trial)
    numbered.number = number
    return numbered
