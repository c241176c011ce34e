"""Define the spec of a job that searches for the parameters of a model, and the code that a spec cannot contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from shoal.data.dataset_spec import DatasetSpec, SplitSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs.spec import AnyJobSpec
from shoal.kinds.training.spec import JobSpec
from shoal.lazy_imports import cloudpickle
from shoal.option_validation import Settings, optional
from shoal.training.boosting.params import ROUNDS, Direction, agreed
from shoal.training.boosting.request import TrainRequest
from shoal.training.demand import GangDemand, ScalingConfig
from shoal.training.pytorch.program import is_name

TUNE: Final = "tune"
"""Value of the field `framework` that marks the spec of a search."""

Sampler = Literal["tpe", "random", "gp", "cmaes", "qmc", "grid"]
Pruner = Literal["median", "halving", "hyperband", "none"]

_KINDS = {"FloatDistribution": "float", "IntDistribution": "int", "CategoricalDistribution": "categorical"}
_MOST_GRID_VALUES = 10_000


class Range(Settings):
    """Values of one parameter among which a search chooses: a range of numbers, or a list of choices.

    A distribution of Optuna is accepted instead.

    Example:
        >>> Range(low=0.01, high=0.3, log=True)
        >>> Range(type="int", low=2, high=10)
        >>> Range(choices=["gbtree", "dart"])
    """

    type: Literal["float", "int", "categorical"] = Field(
        default="float",
        description="Kind of the values: float, int or categorical. If `choices` is given, the default is categorical.",
    )
    low: float | None = Field(default=None, allow_inf_nan=False, description="Smallest value of a range.")
    high: float | None = Field(default=None, allow_inf_nan=False, description="Largest value of a range.")
    log: bool = Field(default=False, description="Whether the logarithms of the values are equally probable.")
    step: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Distance between two values. None: 1 for int, else none."
    )
    choices: tuple[bool | int | float | str | None, ...] = Field(
        default=(), description="The values, if the parameter is categorical."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_distribution(cls, value: Any) -> Any:
        if (kind := _KINDS.get(type(value).__name__)) is not None:
            names = ("choices",) if kind == "categorical" else ("low", "high", "log", "step")
            return {"type": kind, **{name: getattr(value, name) for name in names}}
        if isinstance(value, list | tuple):
            return {"type": "categorical", "choices": value}
        if isinstance(value, Mapping) and "choices" in value:
            return {"type": "categorical", **value}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.type == "categorical":
            if not self.choices or self.low is not None or self.high is not None or self.log or self.step:
                raise ValueError("a categorical parameter has choices, and neither low, high, log nor step")
            return self
        if self.choices or self.low is None or self.high is None:
            raise ValueError("a range of numbers has low and high, and no choices")
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is larger than high={self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"log=true needs low above 0, not {self.low:g}")
        if self.log and self.step is not None and (self.type == "float" or self.step != 1):
            raise ValueError("log and step cannot be given together")
        if self.type == "int" and any(each is not None and each % 1 for each in (self.low, self.high, self.step)):
            raise ValueError("low, high and step of an int must be whole numbers")
        return self

    def suggest(self, trial: Any, name: str) -> Any:
        """Let a trial of Optuna suggest a value for a parameter."""
        if self.type == "categorical":
            return trial.suggest_categorical(name, self.choices)
        low, high = self.ends()
        if self.type == "int":
            return trial.suggest_int(name, low, high, log=self.log, step=1 if self.step is None else int(self.step))
        return trial.suggest_float(name, low, high, log=self.log, step=self.step)

    def ends(self) -> tuple[Any, Any]:
        """Return the first and the last value."""
        if self.type == "categorical":
            return self.choices[0], self.choices[-1]
        assert self.low is not None
        assert self.high is not None
        return (int(self.low), int(self.high)) if self.type == "int" else (self.low, self.high)

    def grid(self) -> list[Any]:
        """Return all values, for a search on a grid.

        Raises:
            InvalidArgumentError: The range has no step, so that its values cannot be counted.
        """
        if self.type == "categorical":
            return list(self.choices)
        low, high = self.ends()
        step = 1.0 if self.type == "int" and self.step is None else self.step
        if step is None or self.log or (high - low) / step > _MOST_GRID_VALUES:
            raise InvalidArgumentError(
                'sampler="grid" needs a parameter\'s choices, or a range with a step: give choices, or another sampler'
            )
        values = [low + step * place for place in range(int((high - low) / step + 1e-9) + 1)]
        return [int(value) for value in values] if self.type == "int" else values


@dataclass(frozen=True)
class SearchCode:
    """Code of a search that its spec cannot contain as data.

    Args:
        function: Pickled function ``(params, context)``, which only the workers unpickle; None: a boosting training.
        space: Function that suggests the parameters of a trial; None: the spec has ranges.
        sampler: Sampler of Optuna; None: the spec names one.
        pruner: Pruner of Optuna; None: the spec names one.
    """

    function: bytes | None = None
    space: Callable[[Any], Any] | None = None
    sampler: Any = None
    pruner: Any = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.function, self.space, self.sampler, self.pruner))


def load_code(path: str | None) -> SearchCode:
    """Return the code in a file of a job; without a file, no code."""
    if path is None:
        return SearchCode()
    from shoal.jobs import shipped_code

    code: SearchCode = cloudpickle.loads(shipped_code.read(path))
    return code


class TuneJobSpec(AnyJobSpec):
    """Spec of a job that searches for the parameters of a boosting model, or of a function.

    Example:
        >>> TuneJobSpec(
        ...     train={"dataset": DataConnector.from_parquet("flights/"), "input_cols": ["distance"], "label_col": "y"},
        ...     space={"max_depth": {"type": "int", "low": 2, "high": 10}},
        ... )
    """

    framework: Literal["tune"] = Field(default=TUNE, description="Kind of the job; the value marks a search.")
    train: TrainRequest | None = optional(
        "Training of a boosting model whose parameters are searched, with the parameters that stay the "
        "same. None: `train_func` or `program` has a function."
    )
    train_func: str | None = optional(
        "Import name of a function ``(params, context)`` as pkg.module:name; the nodes must have the "
        "module installed. None: the trials train a boosting model, or `program` has the function."
    )
    dataset_map: dict[str, DatasetSpec] = Field(
        default_factory=dict, description="Datasets of the function, by name. All trials get all rows."
    )
    holdout: DatasetSpec | None = optional(
        "Dataset on which the models of the trials are compared. None: a part of the training dataset, "
        "on which no trial trains."
    )
    holdout_fraction: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Part of the rows of the training dataset that is the holdout, if `holdout` is not given.",
    )
    space: dict[str, Range] = Field(
        default_factory=dict,
        description="Values among which the search chooses, by the name of the parameter. `n_estimators` is the number "
        "of boosting rounds. Empty: `program` has a function that suggests the parameters of each trial.",
    )
    trials: int = Field(default=40, ge=1, le=100_000, description="Number of trials.")
    sampler: Sampler | None = optional(
        "How parameters are chosen: tpe, random, gp, cmaes, qmc or grid. None: tpe, or the sampler in `program`."
    )
    pruner: Pruner | None = optional(
        "Which trials end early, by their metric so far: median, halving, hyperband or none. None: median, "
        "or the pruner in `program`."
    )
    metric: str | None = Field(
        default=None,
        min_length=1,
        description="Deciding metric, evaluated on the holdout or reported by the function. None: the last metric of "
        "the holdout; for a function, the last one that it reports.",
    )
    direction: Direction | None = optional(
        "Whether the metric is minimized or maximized. None: as the metric demands; a function's value is "
        "minimized. A custom_metric of XGBoost, and a metric that a function names, do not tell it and need this."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the suggestions.")
    batches: bool = Field(
        default=False,
        description="Whether the trials run in batches, one per worker, and each batch begins when all trials of the "
        "one before have ended. Only then are several workers' suggestions the same in each run.",
    )
    early_stopping_rounds: int | None = Field(
        default=None,
        ge=1,
        description="Number of rounds after which a trial stops training if the last metric of the holdout has not "
        "improved. The trial's value is that of its best round, and the winner is trained with so many rounds. None: "
        "trials do not stop early.",
    )
    report_every: int | None = Field(
        default=None,
        ge=1,
        description="Number of boosting rounds between two values by which a trial may be pruned. None: so many that a "
        "trial reports at most 100 values.",
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig,
        description="Number of workers, each of which runs one trial at a time, and the CPUs and GPUs of each.",
    )
    program: str | None = optional(
        "Path of the file with pickled code: the function, the function that suggests parameters, the "
        "sampler and the pruner; `shoal.tune.search` sets the path."
    )
    code_digest: str | None = optional("Digest of the code in `program` and `user_code`; `shoal.tune.search` sets it.")
    user_code: str | None = optional(
        "Path of the file with the pickled callbacks, objective and metrics of the training; "
        "`shoal.tune.search` sets the path."
    )

    refused_by_for_each: ClassVar[str] = (
        "this is the spec of a search: search once, and train with the parameters that it has found for each value"
    )

    @property
    def forks_workers(self) -> bool:  # type: ignore[override]
        """Whether the driver may start the workers itself: those of a training need no Ray."""
        return self.train is not None

    @field_validator("space", mode="before")
    @classmethod
    def _named(cls, space: Any) -> Any:
        if not isinstance(space, Mapping):
            raise ValueError("must be a mapping from names of parameters to their values")
        return space

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.train is not None and self.train_func is not None:
            raise ValueError("train and train_func are both given: a search varies one of them")
        if self.train is None and self.train_func is None and self.program is None:
            raise ValueError("a search needs train (a boosting training) or train_func (a function): give one of them")
        if not self.space and self.program is None:
            raise ValueError("space is empty: give the values of at least one parameter")
        if self.train_func is not None and not is_name(self.train_func):
            raise InvalidArgumentError(f'train_func must look like pkg.module:name, not "{self.train_func}"')
        if self.sampler == "grid":
            for values in self.space.values():
                values.grid()
        return self._of_training(self.train) if self.train is not None else self._of_function()

    def _of_training(self, train: TrainRequest) -> Self:
        if self.dataset_map:
            raise ValueError("dataset_map is only for a function: give the datasets of a training in train")
        if train.eval_set:
            raise ValueError("train has an eval_set, but a search evaluates the holdout: give its rows as holdout")
        if train.init_model is not None:
            raise ValueError("a search does not continue from a model: remove init_model from train")
        if self.holdout is not None and self.holdout.selects_as(train.dataset):
            raise ValueError("holdout is the training dataset: give rows on which no trial trains")
        if any(each.ingester == "ray" for each in self.inputs()):
            raise ValueError("a search reads its rows with Arrow: remove ingester (ingestor_class) from the datasets")
        if self.register_as is not None:
            if self.register_as.skip_if_unchanged:
                raise ValueError("skip_if_unchanged is not possible for a search: omit it, or set it to false")
            # As far as the specs show it; the job compares the rows themselves.
            selects_on_gate = self.holdout is not None and self.holdout.selects_as(self.register_as.holdout)
            if selects_on_gate and self.register_as.overlap != "flag":
                raise ValueError(
                    "register.holdout is the holdout on which the search chooses the parameters, so the model's metric "
                    "would be better than on new rows: name other rows in one of them, or set "
                    'register.overlap="flag" to compare the models nevertheless'
                )
            self.winner({}, 1)
        return self

    def _of_function(self) -> Self:
        if self.register_as is not None:
            raise ValueError("register needs train: a search over a function registers no model")
        if self.holdout is not None:
            raise ValueError('holdout needs train: give the rows to a function as dataset_map["holdout"]')
        if self.metric is not None:
            agreed(f'the metric "{self.metric}" of a function', None, self.direction)
        if self.user_code is not None or self.early_stopping_rounds is not None:
            raise ValueError("user_code and early_stopping_rounds need train")
        return self

    def trial_request(self) -> TrainRequest:
        """Return the training of the trials: with the holdout as eval set, without the holdout's rows."""
        assert self.train is not None
        dataset, holdout = self.train.dataset, self.holdout
        if holdout is None:
            dataset, holdout = self._split(dataset, 0), self._split(dataset, 1)
        changed = {
            "dataset": dataset,
            "eval_set": {"holdout": holdout},
            "run_config": self.run_config,
            "early_stopping_rounds": self.early_stopping_rounds,
        }
        return type(self.train)(**{**dict(self.train), **changed})

    def winner(self, params: Mapping[str, JsonValue], rounds: int | None) -> JobSpec:
        """Return the spec of the training of the best parameters on all rows of the training dataset.

        Args:
            params: Parameters of the best trial.
            rounds: Number of its rounds, which counts if the trials stop early. None, and without
                `early_stopping_rounds`: as many as its parameters say.
        """
        from shoal.training.boosting.trials import with_params

        assert self.train is not None
        request = with_params(self.train, params)
        fields = {name: getattr(request, name) for name in type(request).model_fields}
        counted = {} if rounds is None or self.early_stopping_rounds is None else {ROUNDS: rounds}
        given = {"run_config": self.run_config, **counted}
        spec = JobSpec(**{**fields, **given}, user_code=self.user_code, register=self.register_as)
        return spec.model_copy(update={"tracking": self.tracking, "fingerprint": self.fingerprint})

    def _split(self, dataset: DatasetSpec, index: int) -> DatasetSpec:
        weights = (1 - self.holdout_fraction, self.holdout_fraction)
        split = SplitSpec(weights=weights, index=index, seed=self.seed)
        return dataset.model_copy(update={"splits": (*dataset.splits, split)}).holding(dataset.staged_copy)

    def trainings(self) -> Iterator[TrainRequest]:
        """Yield the training with the parameters that stay the same."""
        if self.train is not None:
            yield self.train

    def profiled(self) -> tuple[DatasetSpec, ...]:
        """Return the training dataset; a search over a function has none."""
        return () if self.train is None else (self.train.dataset,)

    def _subject(self) -> str:
        """Return what is searched."""
        if self.train is not None:
            return f"search for {self.train.framework}: {self.train.label_col}"
        return f"search for {self.train_func or 'a function'}"

    def demand(self) -> GangDemand:
        """Return what the workers of the trials need, and afterwards those of the winner."""
        scaling, inputs = self.scaling_config, tuple(self.inputs())
        if self.train is not None:
            of_trials = self.train.demand_of(scaling)
            return replace(of_trials, run_config=self.run_config, inputs=inputs, also=(self.train.demand().size,))
        gang = scaling.gang(use_gpu=bool(scaling.use_gpu))
        return GangDemand(gang, gang.size, self.run_config, inputs)
