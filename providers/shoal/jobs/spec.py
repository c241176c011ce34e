"""Define the base class for the specs of all kinds of jobs. A spec is plain data that the store keeps as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator
from typing_extensions import TypeIs

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs import ids
from shoal.jobs.register import Register
from shoal.jobs.spec_text import check_json
from shoal.option_validation import Settings, optional
from shoal.secrets.redaction import redact
from shoal.training.demand import GangDemand, gpu_wish
from shoal.training.run_config import RunConfig
from shoal.training.tracking import Caller, Tracking

CODE_FIELDS = ("program", "user_code")
"""Fields in which a spec of any kind may have the path of a file with the user's pickled code."""

NOT_STORED = "not stored yet"
"""Path in a spec of code that is stored when the job is submitted."""

OBJECT_STORE = "an object store, such as s3://bucket/folder"

_LONGEST_LABEL = 300


class AnyJobSpec(Settings, ABC):
    """Base class for the specs of all kinds of jobs, with the fields that all specs have."""

    if TYPE_CHECKING:
        framework: Any
        scaling_config: Any

    refused_by_for_each: ClassVar[str | None] = None
    """Reason why `for_each` refuses specs of this kind; None: it accepts them."""

    exchanges_files: ClassVar[bool] = False
    """Whether the workers exchange rows in files, so that the state store cannot be the location of the results."""

    prints_notes: ClassVar[bool] = False
    """Whether the log shows the notes of every error: a traceback of the user's code."""

    may_call_ray: ClassVar[bool] = False
    """Whether the job calls a function of the user that may use Ray."""

    forks_workers: ClassVar[bool] = False
    """Whether the driver may start the workers itself on a local pool with Ray, because they need no Ray."""

    skips_by_default: ClassVar[bool] = False
    """Whether a task skips the job if rows and settings are those of the newest registered version."""

    run_config: RunConfig = Field(
        default_factory=RunConfig,
        description="Options about the run: its pool, job id, priority, time limits and folder for artifacts.",
    )
    tracking: Tracking | None = Field(
        default_factory=Tracking,
        description="Options for the MLflow run that the job records. null: the job records nothing in MLflow.",
    )
    register_as: Register | None = Field(
        default=None,
        alias="register",
        description="Options to register the model in MLflow and to promote it. None: the model is not registered.",
    )
    fingerprint: str | None = optional(
        "Digest of the spec and of its data, by which the same job is recognised when it is submitted again. shoal "
        "sets the digest at the submission."
    )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Build a spec from fields that come from a file or from an operator's arguments.

        Raises:
            InvalidArgumentError: At least one field is wrong; the message names each of them.
        """
        check_json(fields)
        return super().parse(fields)

    @classmethod
    def check(cls, fields: Mapping[str, Any], is_known: Callable[[Any], bool]) -> None:
        """Check those fields of a spec whose values are known already; see :meth:`Settings.check`.

        Raises:
            InvalidArgumentError: At least one field is wrong; the message names each of them.
        """
        check_json(fields)
        super().check(fields, is_known)

    @property
    def registered_model(self) -> str | None:
        """Return the name of the registered model that the job trains or uses; None if there is none."""
        return self.register_as.model if self.register_as else None

    @property
    def label(self) -> str:
        """Return what the job is about, for lists of jobs: its registered model or another subject, and the name of its
        MLflow run."""
        about = self.register_as.model if self.register_as else self._subject()
        run = self.tracking and self.tracking.run_name
        return redact(f"{about} ({run})" if run and run != about else about)[:_LONGEST_LABEL]

    def demand(self) -> GangDemand:
        """Return what the job needs of its pool's nodes: the workers of `scaling_config`, without GPUs."""
        gang = self.scaling_config.gang(use_gpu=gpu_wish(self.scaling_config, "cpu"))
        return GangDemand(gang, gang.size, self.run_config, tuple(self.inputs()))

    def locations(self) -> Iterator[tuple[str, str, str]]:
        """Yield the files and folders that the pool's nodes have to reach besides those of all jobs; each with a
        description and a remedy if they cannot reach it."""
        yield from ()

    def trainings(self) -> Iterator[Any]:
        """Yield the `TrainRequest` of each boosting training of the job, whose parameters can be checked without
        rows."""
        yield from ()

    def profiled(self) -> tuple[DatasetSpec, ...]:
        """Return the dataset whose rows are compared with those on which the champion was trained, if there is one."""
        return ()

    @abstractmethod
    def _subject(self) -> str:
        """Return what a job without a registered model is about."""

    @model_validator(mode="before")
    @classmethod
    def _tracking_of_run_config(cls, fields: Any) -> Any:
        """Move `tracking` from `run_config` to the spec. Python code sets the option with `RunConfig(tracking=...)`."""
        config = fields.get("run_config") if isinstance(fields, Mapping) else None
        if isinstance(config, RunConfig):
            config = {name: getattr(config, name) for name in config.model_fields_set}
        if not isinstance(config, Mapping) or "tracking" not in config:
            return fields
        if "tracking" in fields:
            raise ValueError("tracking is given twice, in the spec and in run_config: give it only once")
        others = {name: value for name, value in config.items() if name != "tracking"}
        return {**fields, "run_config": others, "tracking": config["tracking"]}

    @model_validator(mode="after")
    def _legal_run(self) -> Self:
        if self.run_config.job_id is not None:
            ids.checked(self.run_config.job_id)
        if self.register_as is not None and self.tracking is None:
            raise ValueError(
                "register needs tracking, because a model is registered from the job's MLflow run: remove "
                '"tracking": null, or remove register'
            )
        return self

    @model_validator(mode="after")
    def _legal_drift(self) -> Self:
        compared = self.profiled() if self.register_as is not None else ()
        if any(each.expect and each.expect.drift and each not in compared for each in self.datasets()):
            raise ValueError(
                "expect.drift compares training rows with those of the champion: only the (first) training dataset of "
                "a job with register that trains one model can have it"
            )
        return self

    def completed(self, pool: str, environment: Mapping[str, str]) -> Self:
        """Return a copy of the spec with the pool's name and with the submitter's MLflow settings.

        These are settings of the submitter's process, such as the tracking URI, the experiment and the active run. They
        are used only for MLflow options that the spec does not set.

        Relative paths of datasets are made absolute, because the job runs in another folder than the submitter.

        Args:
            pool: Name of the pool that the job is submitted to.
            environment: Environment variables of the submitter, such as MLFLOW_TRACKING_URI.
        """
        return self._completed(pool, Caller.of(environment))

    def identifying(self, pool: str | None, environment: Mapping[str, str]) -> Self:
        """Return a copy of the spec, to compute the job's fingerprint from it.

        The copy is like the result of :meth:`completed`, but of the submitter's MLflow settings it has only
        MLFLOW_TRACKING_URI. The other settings may differ if another process submits the same job again.

        Args:
            pool: Name of the pool that the job is submitted to. None: an embedded pool, whose name is another one in
                each process.
            environment: Environment variables of the submitter.
        """
        return self._completed(pool, Caller(environment.get("MLFLOW_TRACKING_URI") or None))

    def _completed(self, pool: str | None, caller: Caller) -> Self:
        spec = self.on_pool(pool).with_datasets(DatasetSpec.located)
        if spec.tracking is None:
            return spec
        return spec.model_copy(update={"tracking": spec.tracking.completed(caller)})

    def on_pool(self, name: str | None) -> Self:
        """Return a copy of the spec whose job runs on the pool of the given name."""
        return self.model_copy(update={"run_config": self.run_config.model_copy(update={"pool_name": name})})

    def document(self) -> dict[str, Any]:
        """Return the spec as plain data for JSON; credentials in the spec are not removed."""
        return self.model_dump(mode="json", by_alias=True)

    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the datasets that the job reads to train, to evaluate or to predict, but not the holdout."""
        for name, value in self:
            if name != "register_as":
                yield from _datasets_in(value)

    def used_columns(self) -> list[str] | None:
        """Return the columns that the job reads of its `inputs`; None if that is not known, or if it compares whole
        rows.

        A job that registers a model compares rows of its datasets with the holdout's: by their times, or else by
        whether a file with the same columns has them.
        """
        named = self._named_columns()
        if named is None or (self.register_as is not None and None in (each.time_col for each in self.datasets())):
            return None
        checked = [name for each in self.datasets() if each.expect for name in each.expect.columns]
        splits = [each.time_split.column for each in self.datasets() if each.time_split]
        times = [each.time_col for each in self.datasets() if each.time_col]
        return list(dict.fromkeys([*named, *times, *splits, *checked]))

    def _named_columns(self) -> Sequence[str] | None:
        """Return the columns that the spec names as those that the job reads of its `inputs`; None: all."""
        return [name for training in self.trainings() for name in training.columns.names] or None

    def datasets(self) -> Iterator[DatasetSpec]:
        """Yield all datasets that the spec names, the holdout included."""
        yield from self.inputs()
        if self.register_as is not None:
            yield self.register_as.holdout

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Return a copy of the spec without the values that may differ between two submissions of the same job.

        The fingerprint is computed from the copy. The copy does not contain, for example, the folder in which the data
        were staged, or the file of the pickled code, whose bytes differ between processes.

        Args:
            by_content: Function that returns the given dataset's spec with a digest of its content in place of its
                location.
        """
        code = {name: "by value" for name in CODE_FIELDS if getattr(self, name, None)}
        return self.with_datasets(by_content).model_copy(update=code)

    def with_datasets(self, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Return a copy of the spec in which the result of `replaced(dataset)` replaces each dataset.

        Args:
            replaced: Function that returns the new dataset for each dataset in the spec.
        """
        changed: Self = _with_datasets(self, replaced)
        return changed

    def staged(self) -> set[str]:
        """Return the directories of staged data: copies of in-memory data that were written for jobs."""
        return {dataset.staging for dataset in self.datasets() if dataset.staging}


def is_spec(given: object) -> TypeIs[AnyJobSpec]:
    """Return whether a value is a spec. A dict with the fields of a spec is none."""
    return isinstance(given, AnyJobSpec)


def _datasets_in(value: Any) -> Iterator[DatasetSpec]:
    if isinstance(value, DatasetSpec):
        yield value
    for each in _parts(value).values():
        yield from _datasets_in(each)


def _with_datasets(value: Any, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Any:
    if isinstance(value, DatasetSpec):
        return replaced(value)
    parts = _parts(value)
    changed = {name: new for name, each in parts.items() if (new := _with_datasets(each, replaced)) is not each}
    if not changed:
        return value
    return value.model_copy(update=changed) if isinstance(value, Settings) else {**value, **changed}


def _parts(value: Any) -> dict[str, Any]:
    """Return the values in which a spec may contain datasets: the fields of options, and the values of mappings."""
    return dict(value) if isinstance(value, Settings | Mapping) and not isinstance(value, DatasetSpec) else {}
