"""Train the trials of a search with LightGBM in one worker, on datasets that are built once.

Only workers import this module, because it imports LightGBM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightgbm.callback import CallbackEnv

from shoal.training import cluster
from shoal.training.boosting.direction import Direction
from shoal.training.boosting.messages import Boosted, History, Segment, Task
from shoal.training.boosting.trials import OnRound
from shoal.training.host import memory
from shoal.training.lightgbm import shared_sample
from shoal.training.lightgbm.messages import shares
from shoal.training.lightgbm.segments import Trainer
from shoal.training.lightgbm.worker import Session, own_errors
from shoal.training.reporting import GangContext

_OF_TRAININGS = frozenset(
    {
        *("learning_rate", "num_leaves", "max_depth", "min_data_in_leaf", "min_sum_hessian_in_leaf", "num_iterations"),
        *("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction", "bagging_freq", "bagging_seed"),
        *("feature_fraction", "feature_fraction_bynode", "feature_fraction_seed", "extra_trees", "extra_seed"),
        *("lambda_l1", "lambda_l2", "linear_lambda", "min_gain_to_split", "path_smooth", "max_delta_step"),
        *("drop_rate", "max_drop", "skip_drop", "xgboost_dart_mode", "uniform_drop", "drop_seed"),
        *("top_rate", "other_rate", "data_sample_strategy", "boosting", "objective_seed"),
        *("min_data_per_group", "cat_l2", "cat_smooth", "max_cat_threshold", "max_cat_to_onehot"),
        *("metric", "scale_pos_weight", "is_unbalance", "alpha", "fair_c", "poisson_max_delta_step", "sigmoid"),
        *("tweedie_variance_power", "histogram_pool_size", "verbosity"),
    }
)
"""Parameters that LightGBM does not use for a dataset, so that trials with other values share the dataset. A trial with
another value of any other parameter builds the dataset anew."""


class Trials:
    """The datasets of this worker, and the parameters with which they were built.

    Args:
        context: Context of a worker that trains alone.
    """

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._key: str | None = None
        self._session: Session | None = None

    def boost(self, task: Task, on_round: OnRound) -> Callable[[Segment], Boosted]:
        """Begin a training, and return the function that trains a segment of it."""
        callbacks = (*task.user_code.callbacks, _Rounds(on_round))
        task = replace(task, user_code=replace(task.user_code, callbacks=callbacks))
        with own_errors():
            trainer = self._trainer(task)

        def boost(segment: Segment) -> Boosted:
            with own_errors():
                return trainer.boost(segment)

        return boost

    def direction(self, task: Task, metric: str | None) -> Direction | None:
        """Return the direction that the user's function tells of its metric; without a name, of the last metric."""
        with own_errors():
            return self._trainer(task).direction(metric)

    def _trainer(self, task: Task) -> Trainer:
        key = repr(sorted((name, repr(each)) for name, each in task.params.items() if name not in _of_trainings(task)))
        if key != self._key:
            self._build(task)
            self._key = key
        assert self._session is not None
        assert self._session.binned is not None
        ending_forks = replace(task, user_code=task.user_code.ending_forks())
        return Trainer(ending_forks, self._context, *self._session.binned)

    def _build(self, task: Task) -> None:
        self._session = self._key = None
        memory.trim()
        [share] = shares([task.train.shard.rows])
        session = Session(task, share, self._context)
        session.port.close()
        chosen = session.sample()
        if cluster.ray_if_connected() is None:
            shared_sample.share(chosen)
        session.prepare(session.bin_sample(chosen), ())
        self._session = session


def _of_trainings(task: Task) -> frozenset[str]:
    """Return the parameters that do not change the dataset."""
    return _OF_TRAININGS - {"min_data_in_leaf"} if task.params.get("feature_pre_filter") else _OF_TRAININGS


class _Rounds:
    """LightGBM callback that passes the metrics of each round on.

    Args:
        on_round: Function that gets the round and the metrics.
    """

    order = 5

    def __init__(self, on_round: OnRound) -> None:
        self._on_round = on_round

    def __call__(self, env: CallbackEnv) -> None:
        history: History = {}
        for name, metric, value, *_ in env.evaluation_result_list or []:
            history.setdefault(name, {})[metric] = [float(value)]
        self._on_round(env.iteration, history)
