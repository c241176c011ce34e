"""The kinds of jobs by the name that their specs have in the field `framework`, and what each kind does.

A further kind is a folder with its spec, its `KindDriver` and its `KindCall`, and a line in `_KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.errors import InvalidArgumentError
from shoal.option_validation import unknown_value
from shoal.secrets.redaction import redact

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.jobs.spec import AnyJobSpec
    from shoal.training.locations import Claim

SpecT = TypeVar("SpecT", bound="AnyJobSpec")
CodeT = TypeVar("CodeT")
AnswerT = TypeVar("AnswerT")
PlaceT = TypeVar("PlaceT")


class _Kind(NamedTuple):
    """A kind: its folder, and the names of its classes in the modules `spec`, `driver` and `call` of this folder."""

    folder: str
    spec: str
    driver: str
    call: str


_KINDS = {
    **dict.fromkeys(BOOSTING_LIBRARIES, _Kind("shoal.kinds.training", "JobSpec", "TrainingDriver", "TrainingCall")),
    "pytorch": _Kind("shoal.kinds.function", "FunctionJobSpec", "FunctionDriver", "FunctionCall"),
    "predict": _Kind("shoal.kinds.prediction", "PredictJobSpec", "PredictionDriver", "PredictionCall"),
    "partitions": _Kind("shoal.kinds.partitions", "PartitionsJobSpec", "PartitionsDriver", "PartitionsCall"),
    "plan": _Kind("shoal.kinds.plan", "PlanJobSpec", "PlanDriver", "PlanCall"),
    "tune": _Kind("shoal.kinds.search", "TuneJobSpec", "SearchDriver", "SearchCall"),
}
"""The kinds. A module of a kind is imported when it is needed for the first time."""


def parse_spec(fields: Mapping[str, Any]) -> AnyJobSpec:
    """Build the spec of a job from fields that come from a file, an operator's arguments or a job's row in the store.

    The field `framework` selects the kind of the spec.

    Raises:
        InvalidArgumentError: At least one field is wrong; the message names each of them.
    """
    return spec_class(fields).parse(fields)


def spec_class(fields: Mapping[str, Any]) -> type[AnyJobSpec]:
    """Return the class of the spec that the field `framework` selects.

    Raises:
        InvalidArgumentError: The framework is unknown.
    """
    framework = fields.get("framework", "xgboost")
    if isinstance(framework, str) and framework not in _KINDS:
        *most, last = (f"'{name}'" for name in _KINDS)
        raise InvalidArgumentError(unknown_value("framework", redact(framework), f"{', '.join(most)} or {last}"))
    # If the framework is not a text, the spec of a training raises the error when it parses the fields.
    found: type[AnyJobSpec] = _class(framework if isinstance(framework, str) else "xgboost", "spec")
    return found


def driver_of(spec: AnyJobSpec) -> KindDriver[Any, Any]:
    """Return what the kind of a job does in the driver of an attempt."""
    found: KindDriver[Any, Any] = _class(spec.framework, "driver")(spec)
    return found


def call_of(spec: AnyJobSpec, code: Any = None) -> KindCall[Any, Any, Any]:
    """Return what the kind of a job does in the process of its caller, who has the code that the spec does not have."""
    found: KindCall[Any, Any, Any] = _class(spec.framework, "call")(spec, code)
    return found


def import_for_drivers() -> None:
    """Import what drivers need of every kind, so that processes that are forked for drivers share these modules."""
    for framework in _KINDS:
        for part in ("spec", "driver"):
            _class(framework, part)


def _class(framework: str, part: str) -> Any:
    kind = _KINDS[framework]
    return getattr(import_module(f"{kind.folder}.{part}"), getattr(kind, part))


class KindDriver(ABC, Generic[SpecT, PlaceT]):
    """What a kind does in the driver of an attempt."""

    def __init__(self, spec: SpecT) -> None:
        self.spec = spec

    def begin(self) -> None:
        """Prepare the imports of this process and of the workers, while the MLflow run begins."""
        from shoal.training.host.imports import complete_libraries

        # This process may have imported XGBoost or LightGBM without scikit-learn. The job's model or function may need
        # the complete library.
        complete_libraries()

    @abstractmethod
    def work(self, place: PlaceT) -> tuple[JobResult, str | None]:
        """Do the work of the job, from its checks to the registration of a model.

        Returns:
            The job's result, and the digest of a file with results that are unpickled; None if there is none.

        Raises:
            ShoalError: The job failed; the message states the cause.
        """


class KindCall(ABC, Generic[SpecT, CodeT, AnswerT]):
    """What a call of a kind does in the process of its caller.

    Args:
        spec: Spec of the job; the paths of its code are placeholders.
        code: Code of the user, which is stored when the job is submitted.
    """

    returns_model: ClassVar[bool] = False
    """Whether the answer is a model. To load the model, the caller needs the job's version of the model's library."""

    tracks_like_caller: bool = False
    """Whether the job records an MLflow run only if the caller uses MLflow, or the spec says so."""

    may_call_ray: bool | None = None
    """Whether the user's function may call Ray; None: as the spec says."""

    def __init__(self, spec: SpecT, code: CodeT) -> None:
        self.spec = spec
        self.code = code

    def check(self) -> None:
        """Find errors in the arguments before a pool is started. The job repeats the checks.

        Raises:
            InvalidArgumentError: The folder for the results cannot be written.
        """
        from shoal.jobs.files import storage
        from shoal.training import locations

        locations.try_out(storage.root(self.spec.run_config.artifact_location))

    def stored(self) -> dict[str, Any]:
        """Store the code, and return the fields of the spec that name its files."""
        return {}

    @abstractmethod
    def read(self, result: JobResult, location: str | None) -> AnswerT:
        """Read what the engine has returned from the result of the job, whose `artifact_location` may have
        credentials."""

    def value(self, answer: AnswerT) -> Any:
        """Return the value of the call from what the engine has returned."""
        return answer

    @abstractmethod
    def run_here(self, env: Mapping[str, str], claim: Claim) -> AnswerT:
        """Run the engine in the Ray cluster to which this process is connected.

        Args:
            env: Environment variables of the workers.
            claim: Mark of the folders of the run.
        """
