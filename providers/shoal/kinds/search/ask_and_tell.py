"""Decide in the driver which trial a worker runs next, when a trial ends early, and what the study records of it.

Only the driver asks and tells Optuna. Workers send questions, each of which is answered at once or when there is a
trial for the worker. The class knows neither workers nor the store, apart from the study's storage.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.kinds.search.spec import Range
from shoal.kinds.search.study_storage import (
    ERROR,
    LOST_WORKERS,
    NUMBER,
    OUTCOME,
    PARAMS,
    REPEATED,
    SENT,
    SHOWN,
    Ended,
    best_first,
    direction_of,
    ended_in,
)
from shoal.lazy_imports import optuna
from shoal.training.boosting.trials import TrialParams
from shoal.training.gang.gang import Reply
from shoal.training.host.own_process import ending_forks
from shoal.training.reporting import say
from shoal.training.trial_worker import Trial

_MOST_DEPTH = 3
"""Levels of samplers inside samplers, such as TPE's sampler of the first trials."""


def sampler_named(name: str | None) -> optuna.samplers.BaseSampler:
    """Return the sampler that a spec names; by default TPE. The trials of a grid are enqueued, so it needs none."""
    made = {
        "tpe": optuna.samplers.TPESampler,
        "random": optuna.samplers.RandomSampler,
        "grid": optuna.samplers.RandomSampler,
        "gp": optuna.samplers.GPSampler,
        "cmaes": optuna.samplers.CmaEsSampler,
        "qmc": optuna.samplers.QMCSampler,
    }
    sampler: optuna.samplers.BaseSampler = made[name or "tpe"](seed=0)
    return sampler


def pruner_named(name: str | None) -> optuna.pruners.BasePruner:
    """Return the pruner that a spec names; by default the median pruner, as in Optuna."""
    made = {
        "median": optuna.pruners.MedianPruner,
        "halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "none": optuna.pruners.NopPruner,
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
    for place, value in enumerate(vars(sampler).values()):
        if isinstance(value, optuna.samplers.BaseSampler) and depth:
            _seed(value, seed + place + 1, depth - 1)
        # `reseed_rng` takes no seed. All samplers of Optuna keep their random numbers in such an object.
        elif hasattr(value, "rng") and hasattr(value.rng, "seed"):
            value.rng.seed((seed + place) % 2**32)


def grid(space: Mapping[str, Range]) -> list[dict[str, Any]]:
    """Return the parameters of all trials of a search on a grid."""
    values = [each.grid() for each in space.values()]
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


_BATCH = "shoal:batch"

_MOST_ATTEMPTS = 2
"""Number of workers that a trial may end. The first end may have another cause, such as the memory that another program
has used."""

Suggest = Callable[["optuna.Trial"], Mapping[str, Any]]
Check = Callable[[Mapping[str, Any]], TrialParams | None]


@dataclass
class Search:
    """The trials of one study.

    Args:
        study: The study; its pruner is that of the search, and its sampler is copied and seeded for each trial.
        suggest: Function that suggests the parameters of a trial.
        check: Function that checks parameters with the library before a worker gets them; an error fails the trial.
        trials: Number of trials.
        seed: Seed of the study.
        batch: Number of trials in a batch, which begins when the one before has ended; None: no batches.
        grid: Parameters of each trial, if they are not suggested.
        flush: Function that writes the study's entries to the store.
        on_end: Function that is called with each trial that ends, and at first with those that have ended before.
    """

    study: optuna.Study
    suggest: Suggest
    check: Check
    trials: int
    seed: int = 0
    batch: int | None = None
    grid: Sequence[Mapping[str, Any]] = ()
    flush: Callable[[], None] = lambda: None
    on_end: Callable[[Ended], None] = lambda ended: None

    def __post_init__(self) -> None:
        self._sampler = self.study.sampler
        self._open: dict[int, optuna.Trial] = {}
        self._ready: deque[Trial] = deque()
        self._untold: dict[int, optuna.Trial] = {}
        self._ended: dict[int, Ended] = {}
        self._waiting: deque[tuple[int, Reply]] = deque()
        self._running: dict[int, int] = {}
        if self.grid:
            self.trials = min(self.trials, len(self.grid))
        if self.batch is not None:
            # A search that continues with another number of workers keeps its batches.
            kept = self.study.user_attrs.get(_BATCH)
            if kept is None:
                self.study.set_user_attr(_BATCH, self.batch)
            self.batch = kept or self.batch
        self.study = study_of(self.study, lambda trial: REPEATED not in trial.user_attrs)
        # In batches, only trials of earlier batches decide about the end of another trial, because those of one batch
        # come forward in another order each time.
        self._known_to_pruner = study_of(self.study, lambda trial: self.batch is None or trial.state.is_finished())
        self._enqueue_open_trials()
        for ended in ended_in(self.study):
            self._note(ended)

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended."""
        return len(self._ended) >= self.trials

    @property
    def ended(self) -> list[Ended]:
        """The trials that have ended, in the order of their numbers."""
        return [self._ended[number] for number in sorted(self._ended)]

    def on_question(self, rank: int, question: Mapping[str, Any], reply: Reply) -> None:
        """Answer a worker: whether its trial should end, or which trial it runs next."""
        if "value" in question:
            trial = self._open[question["trial"]]
            trial.report(question["value"], question["step"])
            frozen = self.study._storage.get_trial(trial._trial_id)
            reply(bool(self.study.pruner.prune(self._known_to_pruner, frozen)))  # some pruners return NumPy's
            return
        if (outcome := question["outcome"]) is not None:
            self._running.pop(rank, None)
            self._finish(outcome)
        self._waiting.append((rank, reply))
        self._hand_out()

    def worker_lost(self, rank: int, reason: str) -> bool:
        """Repeat the trial of a worker that was lost, or fail it if it has ended another worker before.

        Args:
            rank: Rank of the worker, whose place a new worker has taken.
            reason: Reason of the loss.

        Returns:
            Whether the worker has run a trial. If it has not, no trial can be the cause.
        """
        self._waiting = deque(each for each in self._waiting if each[0] != rank)
        if (number := self._running.pop(rank, None)) is None:
            return False
        frozen = self.study._storage.get_trial(self._open[number]._trial_id)
        lost = frozen.user_attrs.get(LOST_WORKERS, 0) + 1
        if lost >= _MOST_ATTEMPTS:
            error = f"the worker of the trial was lost in {lost} attempts: {reason}"
            self._finish({"trial": number, "state": "failed", "error": error})
        else:
            say(f"a worker was lost, because {reason}: its trial {number} is repeated")
            del self._open[number]
            self._enqueue_again(frozen, lost)
            if self.batch is not None:
                again = self._ask(number + 1)
                assert again is not None and again.number == number, "only this trial of the batch waits"
                self._ready.append(again)
        self._hand_out()
        return True

    def workers_lost(self) -> None:
        """Prepare to repeat the trials of workers that were lost, with the same parameters."""
        self._waiting.clear()
        self._running.clear()
        self._open.clear()
        self._ready.clear()
        self._enqueue_open_trials()

    def best(self) -> Ended:
        """Return the best trial.

        Raises:
            TrainingError: No trial has a value.
        """
        best = next(iter(best_first(self.ended, direction_of(self.study))), None)
        if best is None or best.state != "complete":
            failed = [each for each in self.ended if each.error is not None]
            if len(failed) == len(self._ended) and failed:
                raise TrainingError(f"all {len(failed)} trials failed; the first error is that of trial "
                                    f"{failed[0].number} with {failed[0].params}: {failed[0].error}")  # fmt: skip
            raise TrainingError(
                f"none of {len(self._ended)} trials has a value: {len(failed)} failed, and the others were pruned. "
                "Choose another pruner, or more trials"
            )
        return best

    # Handing out

    def _hand_out(self) -> None:
        while self._waiting and (trial := self._next()) is not None:
            rank, reply = self._waiting.popleft()
            self._running[rank] = trial.number
            reply(trial.sent())
        if self.is_over:
            while self._waiting:
                self._waiting.popleft()[1](None)

    def _next(self) -> Trial | None:
        """Return the next trial for a worker; None if there is none, or none yet."""
        if self.batch is None:
            return self._ask(self.trials)
        while not self._open and not self.is_over:
            index = next(each for each in range(self.trials) if each not in self._ended) // self.batch
            while (trial := self._ask(min(self.trials, (index + 1) * self.batch))) is not None:
                self._ready.append(trial)
            if not self._ready:
                self._tell_batch()
        return self._ready.popleft() if self._ready else None

    def _ask(self, stop: int) -> Trial | None:
        """Ask Optuna for a trial whose number is below `stop`; None if there is none. Trials whose parameters cannot be
        suggested, or are refused by the library, fail here."""
        while True:
            waiting = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
            taken = {*self._ended, *self._open, *self._untold}
            number = waiting[0].user_attrs[NUMBER] if waiting else next(n for n in range(stop + 1) if n not in taken)
            if number >= stop:
                return None
            if not waiting:
                # The sampler needs the number.
                self.study.enqueue_trial(dict(self.grid[number]) if self.grid else {}, user_attrs={NUMBER: number})
            self.study.sampler = seeded(self._sampler, self.seed, number)
            trial = self.study.ask()
            try:
                with ending_forks():
                    params = dict(self.suggest(trial))
                json.dumps(params)
                trial.set_user_attr(PARAMS, params)
                checked = self.check(params)
            except (Exception, SystemExit) as error:  # user code suggests, and the library checks
                message = str(error) if isinstance(error, InvalidArgumentError) else f"{type(error).__name__}: {error}"
                trial.set_user_attr(ERROR, message)
                self._tell(number, trial, {"state": "failed"})
                continue
            trial.set_user_attr(SENT, True)
            self.flush()
            self._open[number] = trial
            return Trial(number, params, checked)

    # Recording

    def _finish(self, outcome: Mapping[str, Any]) -> None:
        number = outcome["trial"]
        trial = self._open.pop(number)
        for name in SHOWN:
            if outcome.get(name) is not None:
                trial.set_user_attr(name, outcome[name])
        given = {"state": outcome["state"], "value": outcome.get("value")}
        if given["state"] == "complete" and math.isnan(given["value"]):
            trial.set_user_attr(ERROR, "the value of the deciding metric is NaN")
            given["state"] = "failed"
        if self.batch is None:
            self._tell(number, trial, given)
            return
        # The trials of a batch end together, so that pruners and samplers do not depend on which of them was first.
        trial.set_user_attr(OUTCOME, given)
        self.flush()
        self._untold[number] = trial
        if not self._open:
            self._tell_batch()

    def _tell_batch(self) -> None:
        for number in sorted(self._untold):
            trial = self._untold.pop(number)
            self._tell(number, trial, trial.user_attrs[OUTCOME])

    def _tell(self, number: int, trial: optuna.Trial, outcome: Mapping[str, Any]) -> None:
        if outcome["state"] == "complete":
            frozen = self.study.tell(trial, outcome["value"])
        else:
            state = optuna.trial.TrialState.PRUNED if outcome["state"] == "pruned" else optuna.trial.TrialState.FAIL
            frozen = self.study.tell(trial, state=state)
        assert number not in self._ended, f"trial {number} has ended twice"
        self._note(Ended.of(frozen))

    def _note(self, ended: Ended) -> None:
        self._ended[ended.number] = ended
        self.on_end(ended)

    def _enqueue_open_trials(self) -> None:
        """Fail the trials that no worker runs any more, and enqueue them again with the same parameters.

        A trial whose parameters were not complete gets them anew, from the same random numbers.
        """
        waiting = {each.user_attrs[NUMBER] for each in self.study.get_trials(states=(optuna.trial.TrialState.WAITING,))}
        self._untold.clear()
        for frozen in self.study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            found = frozen.user_attrs
            if OUTCOME in found:
                self._untold[found[NUMBER]] = optuna.Trial(self.study, frozen._trial_id)
                continue
            again = SENT in found and found[NUMBER] not in waiting
            self._enqueue_again(frozen, found.get(LOST_WORKERS, 0), enqueue=again)

    def _enqueue_again(self, frozen: optuna.trial.FrozenTrial, lost_workers: int, *, enqueue: bool = True) -> None:
        """Fail a trial that no worker runs any more, and enqueue it with the same parameters. Both are written at once,
        so that a trial has lost as many workers as the study says, also if the driver is killed here."""
        if enqueue:
            lost = {LOST_WORKERS: lost_workers} if lost_workers else {}
            self.study.enqueue_trial(frozen.params, user_attrs={NUMBER: frozen.user_attrs[NUMBER], **lost})
        trial = optuna.Trial(self.study, frozen._trial_id)
        trial.set_user_attr(REPEATED, True)
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)


def study_of(study: optuna.Study, is_known: Callable[[optuna.trial.FrozenTrial], bool]) -> optuna.Study:
    """Return a view of a study with some of its trials, in the order of the search's numbers, and with these numbers.

    Optuna's TPE gives newer trials more weight, and Hyperband chooses the bracket of a trial by its number.
    """
    # Hyperband makes a study of its own for each bracket, which reads the storage: so the storage is wrapped.
    storage: Any = _Storage(study._storage, is_known)
    return optuna.Study(study.study_name, storage, study.sampler, study.pruner)


class _Storage:
    """Storage of Optuna with the trials of a view.

    Args:
        storage: The storage, which does everything else.
        is_known: Function that returns whether a trial is listed.
    """

    def __init__(self, storage: Any, is_known: Callable[[optuna.trial.FrozenTrial], bool]) -> None:
        self._storage = storage
        self._is_known = is_known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get_all_trials(self, *args: Any, **options: Any) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that are listed; the arguments are those of Optuna's storages."""
        found = self._storage.get_all_trials(*args, **options)
        return sorted((_numbered(each) for each in found if self._is_known(each)), key=lambda each: each.number)

    def get_trial(self, trial_id: int) -> optuna.trial.FrozenTrial:
        """Return a trial by Optuna's id."""
        return _numbered(self._storage.get_trial(trial_id))

    def get_trial_number_from_id(self, trial_id: int) -> int:
        """Return the number of a trial."""
        return self.get_trial(trial_id).number


def _numbered(trial: optuna.trial.FrozenTrial) -> optuna.trial.FrozenTrial:
    number = trial.user_attrs.get(NUMBER, trial.number)
    if number == trial.number:
        return trial
    numbered = copy.copy(trial)
    numbered.number = number
    return numbered
