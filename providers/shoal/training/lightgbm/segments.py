"""Train a LightGBM model in segments (groups of rounds that end with a checkpoint).

A training that was interrupted and resumed from a checkpoint gives the same model, byte for byte.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import lightgbm
from lightgbm.basic import _LIB, _safe_call
from lightgbm.callback import CallbackEnv, EarlyStopException

from shoal.boosting_libraries import loaded
from shoal.errors import InvalidArgumentError
from shoal.training.boosting import params
from shoal.training.boosting.messages import Boosted, Checkpoint, History, RoundReporter, Segment, Task, part_of
from shoal.training.host import memory
from shoal.training.host.own_process import ending_forks
from shoal.training.lightgbm.dataset import Binned
from shoal.training.lightgbm.params import direction_of, is_forest, segment_params
from shoal.training.reporting import GangContext


class Trainer:
    """Trainer of a LightGBM model on this rank.

    Each call of :meth:`boost` trains a segment (a group of rounds that ends with a checkpoint).

    Args:
        task: Data and parameters of this worker.
        context: Gang context of this worker.
        train: Training set.
        evals: Eval sets by name; all ranks have the same rows.
    """

    def __init__(self, task: Task, context: GangContext, train: Binned, evals: dict[str, Binned]) -> None:
        self._task = task
        self._context = context
        self._train = train
        self._evals = evals
        self._state = Checkpoint()
        self._first_round = 0
        self._booster: lightgbm.Booster | None = None
        self._params: dict[str, Any] = {}

    def boost(self, segment: Segment) -> Boosted:
        """Train the rounds of a segment, up to the next checkpoint, and return the result of this rank."""
        began = time.perf_counter()
        if segment.resume is not None:
            self._state = segment.resume
            self._first_round = segment.resume.rounds
        booster = self._booster = self._booster_for(segment)
        # The history is a copy, so that the rounds of this segment do not change the checkpoint.
        history, rounds = part_of(self._state.history), self._state.rounds
        # As in `lightgbm.train`, callbacks and the number of the best round count the rounds of the model from which
        # the training continued, too.
        before = self._state.init_rounds
        stopping = self._stopping(booster, history)
        stopped = stopping is not None and stopping.stopped
        # LightGBM's callbacks regard round `end - 1` as the last round of the training, and print a summary in this
        # round. The summary must be printed only in the last segment. In all other segments, `end` is therefore
        # `segment.stop + 1`, so that the segment stops before round `end - 1`.
        end = segment.stop if segment.last else segment.stop + 1
        unprinted = ""
        reporter = RoundReporter(self._context, rounds)
        asked: EarlyStopException | None = None
        decisive: Any = None
        with reporter.reporting_on_error(history):
            while rounds < segment.stop and not stopped:
                place = (booster, self._params, before + rounds, before + self._first_round, before + end)
                self._call_back(CallbackEnv(*place, None), before=True)
                booster.update(fobj=self._task.user_code.objective)
                results = self._evaluate(booster)
                for result in results:
                    history.setdefault(result[0], {}).setdefault(result[1], []).append(float(result[2]))
                if self._task.user_code.metrics:
                    params.refuse_namesakes(history, rounds + 1)
                unprinted = self._print_metrics(before + rounds, results)
                if stopping is not None:
                    decisive = self._decisive(results)
                    self._check_stopping(decisive, first=rounds == 0)
                    stopping.see(float(decisive[2]))
                asked = self._call_back(CallbackEnv(*place, results), before=False)
                stopped = asked is not None or (stopping is not None and stopping.stopped)
                rounds += 1
                reporter.done(rounds, history)
        if unprinted and (stopped or segment.last):
            self._context.log(unprinted)
        if rounds > self._state.rounds:
            # A new checkpoint is created only if a round was trained. Otherwise it would contain the same trees as the
            # last checkpoint, but with another text, because the text of a model contains the seed of the segment.
            self._state = Checkpoint(rounds, booster.model_to_string(num_iteration=-1).encode(), history, before)
        best, score = _best(stopping, asked, before)
        if decisive is not None and stopped and score is not None:
            params.check_best_score(decisive[0], decisive[1], score)
        return Boosted(
            stopped=stopped,
            checkpoint=self._state if self._context.rank == 0 else None,
            best_iteration=best,
            best_score=score,
            train_seconds=time.perf_counter() - began,
            peak_rss_bytes=memory.peak_rss_bytes(),
        )

    def direction(self, metric: str | None) -> params.Direction | None:
        """Return the direction that a metric function of the user tells, before the first round; without a name, that
        of the last one.

        Raises:
            InvalidArgumentError: No function has this metric.
        """
        results = self._evaluate(self._booster_for(Segment(0, 1, True, Checkpoint())))
        found = [each for each in results if metric in (None, each[1])]
        if not found:
            names = ", ".join(each[1] for each in results)
            raise InvalidArgumentError(f'the metric "{metric}" was not evaluated, but only {names}: name one of these')
        return params.told(found[-1][1], found[-1][3])

    def _booster_for(self, segment: Segment) -> lightgbm.Booster:
        """Return the booster for a segment of rounds: the booster of the previous segment, or a new booster from the
        checkpoint.

        A booster that is loaded from its bytes usually continues exactly like the booster in memory, to the last bit.
        There are two exceptions: LightGBM has state that the bytes do not contain, or the values of the trees were
        added to margins one by one. In these two cases, every segment begins with a booster that is loaded from bytes.
        A resumed training then gives the same model as a training that was not interrupted.
        """
        if self._booster is not None and segment.resume is None and not loaded("lightgbm").reads_again(self._task):
            return self._booster
        # The old booster is freed before a new one is created, because each booster keeps scores of all rows in memory.
        self._booster = None
        # The user's callbacks get the dict `_params` and may change it: LightGBM's callback reset_parameter, for
        # example, also writes the new learning rate into this dict. Therefore each new booster gets a new dict.
        self._params = segment_params(self._task.params, self._task.seed, segment.index)
        model = self._state.model
        old = lightgbm.Booster(model_str=model.decode()) if model else None
        threads = self._task.params["num_threads"]
        # In a random forest, no tree depends on the earlier trees. Therefore the predictions of the checkpoint's model
        # (`old`) are not added to the scores from which the next trees start.
        self._train.start_from(None if is_forest(self._params) else old, threads)
        for binned in self._evals.values():
            binned.start_from(old, threads)
        booster = lightgbm.Booster(self._params, self._train.dataset)
        if old is not None:
            # LGBM_BoosterMerge inserts the trees of the checkpoint (`old`) before the trees of the new booster. It does
            # not change the scores of the rows, which start_from() has already set.
            _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, old._handle))
        for name, binned in self._evals.items():
            booster.add_valid(binned.dataset, name)
            if self._is_train(name):
                # LightGBM's callback early_stopping, too, skips the eval set with this name.
                booster.set_train_data_name(name)
        return booster

    def _stopping(self, booster: lightgbm.Booster, history: History) -> Stopping | None:
        """Create the early stopping object for the last metric of the last eval set that is not the training set, with
        the metric's values so far.
        """
        patience = self._task.early_stopping_rounds
        if patience is None:
            return None
        name, metric, _, flag = self._decisive(self._evaluate(booster))[:4]
        known = params.told(metric, flag) if self._task.user_code.metrics else direction_of(metric)
        direction = params.agreed(f'the metric "{metric}"', known, self._task.direction)
        return Stopping(patience, direction == "maximize", history.get(name, {}).get(metric, ()))

    def _check_stopping(self, result: Sequence[Any], *, first: bool) -> None:
        """Raise an error if the metric that stops the training early, of which `result` is the newest result,
        cannot decide."""
        name, metric, value = result[:3]
        params.check_stopping_metric(
            name,
            metric,
            float(value),
            self._evals[name].dataset.get_label() if first else None,
            grouped=False,
            classes=int(self._task.params.get("num_class") or 2),
        )

    def _decisive(self, results: Sequence[Any]) -> Any:
        """Return the result that early stopping looks at: as in LightGBM, never one of the training set."""
        return [result for result in results if not self._is_train(result[0])][-1]

    def _is_train(self, name: str) -> bool:
        return self._task.eval_sets[name].connector is self._task.train.connector

    def _evaluate(self, booster: lightgbm.Booster) -> list[Any]:
        """Evaluate all metrics on all eval sets; for each eval set, LightGBM's own metrics come first."""
        return list(booster.eval_valid(list(self._task.user_code.metrics)))

    def _print_metrics(self, rounds: int, results: Sequence[Any]) -> str:
        """Print a line with the metrics after every `print_every`-th round. After other rounds, return the line instead
        of printing it."""
        if self._context.rank or not self._task.print_every or not results:
            return ""
        text = "\t".join((f"[{rounds}]", *(f"{result[0]}-{result[1]}:{result[2]:.5f}" for result in results)))
        if rounds % self._task.print_every:
            return text
        self._context.log(text)
        return ""

    def _call_back(self, place: CallbackEnv, *, before: bool) -> EarlyStopException | None:
        """Call the user's callbacks in their order. If a callback stops the training early, return the callback's
        exception."""
        callbacks = [
            call for call in self._task.user_code.callbacks if getattr(call, "before_iteration", False) == before
        ]
        try:
            for call in sorted(callbacks, key=lambda call: getattr(call, "order", 0)):
                with ending_forks():
                    call(place)
        except EarlyStopException as asked:
            return asked
        return None


def _best(stopping: Stopping | None, asked: EarlyStopException | None, before: int) -> tuple[int | None, float | None]:
    """Return the best round and its metric, from shoal's early stopping or from LightGBM's early stopping callback."""
    if stopping is not None:
        return (None, None) if stopping.best_round is None else (before + stopping.best_round, stopping.best_value)
    if asked is None:
        return None, None
    return asked.best_iteration, float(asked.best_score[-1][2]) if asked.best_score else None


class Stopping:
    """Record the values of one metric, find the best round, and decide when the training stops early.

    Args:
        patience: Number of rounds without improvement after which training stops.
        higher_is_better: Whether higher values of the metric are better.
        seen: Values of the metric in the previous rounds.
    """

    def __init__(self, patience: int, higher_is_better: bool, seen: Iterable[float] = ()) -> None:
        self.best_round: int | None = None
        self.best_value = math.nan
        self._patience = patience
        self._higher = higher_is_better
        self._rounds = 0
        for value in seen:
            self.see(value)

    @property
    def stopped(self) -> bool:
        """Whether the metric has not improved for `patience` rounds. A metric that was always NaN counts as not
        improved."""
        best = -1 if self.best_round is None else self.best_round
        return self._rounds - 1 - best >= self._patience

    def see(self, value: float) -> None:
        """Record the metric's value of the next round, and update the best round."""
        better = value > self.best_value if self._higher else value < self.best_value
        if better or (self.best_round is None and not math.isnan(value)):
            self.best_round, self.best_value = self._rounds, value
        self._rounds += 1
