"""Summarise the trainings of many models, and find the models without a recent promotion and the jobs that have waited
in the queue for too long."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self, get_args

from pydantic import Field
from sqlalchemy import select

from shoal.errors import InvalidArgumentError, shown
from shoal.jobs.kind import parse_spec
from shoal.jobs.register import DEFAULT_ALIAS
from shoal.jobs.results import JobResult, PlainResult, PromotionResult, RecentVersion, finite
from shoal.jobs.spec import AnyJobSpec
from shoal.jobs.submission import MOST_LISTED, list_jobs
from shoal.models.decision import figure, is_better
from shoal.models.ledger import confirmed_promotions
from shoal.models.metrics import best_mode
from shoal.option_validation import optional, positive_seconds
from shoal.secrets.redaction import one_line
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.reporting import HOLDOUT, metric_name
from shoal.training.tracking import MODEL_VERSION

Outcome = Literal["promoted", "kept", "waiting", "trained", "predicted", "failed", "skipped"]
"""Outcome of one job. promoted: the new model became the champion. kept: the present champion remains. waiting: the new
version waits for a decision. trained: the model is not registered. predicted: the model has predicted rows. failed: the
job or its task has failed. skipped: no training was needed."""

_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_OF_DECISIONS: dict[bool | None, Outcome] = {True: "promoted", False: "kept", None: "waiting"}


@dataclass(frozen=True)
class NoResult:
    """Stand-in for the result of a training that has none, because it failed or was skipped.

    Attributes:
        cause: Reason why there is no result.
        skipped: Whether the training was skipped. False: the training failed.
    """

    cause: str
    skipped: bool = False


class ModelLine(PlainResult):
    """One line of a summary: the outcome of one job, which has trained a model or predicted with it."""

    model: str = Field(
        description="Name of the registered model; for a model that is not registered, the id or label of its job."
    )
    outcome: Outcome = Field(
        description="End of the job: promoted, kept, waiting, trained, predicted, failed or skipped."
    )
    version: str | None = optional(
        "Version number in MLflow's registry of the new model, or of the model that predicts. None: there "
        "is no version."
    )
    metric: str | None = optional(
        "Name of the metric that decides about the promotion, or about the trials of a search. None: there "
        "is none, or the job does not name it."
    )
    value: float | None = optional(
        "Value of the metric that the new model reaches on the holdout, or the best trial. None: unknown."
    )
    champion: float | None = optional(
        "Value of the metric that the champion before this training reaches on the same holdout. None: "
        "there was no champion, its metric is unknown, or one of the two models was trained on rows of this holdout."
    )
    champion_version: str | None = optional(
        "Version number of the champion before this training. None: there was no champion."
    )
    sentence: str = Field(
        description="Reason for the outcome, such as the cause of a failure, and the facts of a search, of models of "
        "partitions or of predictions."
    )
    recent: tuple[RecentVersion, ...] = Field(
        default=(), description="The versions of the model before the new one, the newest first, at most ten."
    )

    @classmethod
    def of(cls, spec: AnyJobSpec | Mapping[str, Any] | str, result: Any) -> Self:
        """Build the summary's line for one job of any kind, from the job's spec and result.

        Args:
            spec: Spec of the job, its fields, or the name of a model without a spec.
            result: The job's `JobResult` or its dict; a `PromotionResult` or its dict; a `NoResult`, or the exception
                with which the job failed.

        Raises:
            InvalidArgumentError: `result` is of another type.
        """
        model, metric = _model_of(spec)
        line = partial(cls, model=model, metric=metric)
        if isinstance(result, BaseException):
            result = NoResult(str(result) or type(result).__name__)
        if isinstance(result, NoResult):
            outcome: Outcome = "skipped" if result.skipped else "failed"
            return line(outcome=outcome, sentence=one_line(result.cause))
        if isinstance(result, Mapping):
            # Only the result of `promote_model` names the alias.
            result = PromotionResult.parse(result) if "alias" in result else JobResult.parse(result)
        if isinstance(result, PromotionResult):
            line = partial(cls, model=result.model_name, metric=result.metric)
            metric = result.metric
        elif not isinstance(result, JobResult):
            raise InvalidArgumentError(
                f"the result of model {model} is {shown(result)}: give a JobResult or its dict, a NoResult, or an "
                "exception"
            )
        elif result.skipped:
            return line(outcome="skipped", version=result.model_version, sentence=one_line(result.skipped))
        elif result.promoted is None and result.decision is None:
            search, named = result.search, MODEL_VERSION.fullmatch(result.model_uri)
            return cls(
                model=model,
                outcome="trained" if result.output_path is None else "predicted",
                version=named and named["version"],
                metric=search.metric if search else None,
                value=search.best_value if search else None,
                sentence="; ".join(_facts(result)),
            )
        known, facts = result.champion, [] if isinstance(result, PromotionResult) else _facts(result)
        sentence = "there is no decision" if result.decision is None else one_line(result.decision.sentence)
        return line(
            outcome=_OF_DECISIONS[result.promoted],
            version=result.model_version,
            value=result.metrics.get(metric_name(HOLDOUT, metric)) if metric else None,
            champion=None if known is None or known.unseen_rows is not None else finite(known.value),
            champion_version=None if known is None else known.version,
            sentence="; ".join([sentence, *facts]),
            recent=result.recent,
        )

    def __str__(self) -> str:
        """Return the line as text, such as ``promoted  delays-UA: rmse 17.2, champion 18.1: ...``."""
        figures = "" if self.value is None else f" {self.metric or 'value'} {figure(self.value)}"
        if figures and self.champion is not None:
            figures += f", champion {figure(self.champion)}"
        return f"{self.outcome:<9} {self.model}:{figures and figures + ':'} {self.sentence}"


def summary(specs: Sequence[AnyJobSpec | Mapping[str, Any] | str], results: Sequence[Any]) -> list[ModelLine]:
    """Return one line per model, in the order of the specs.

    Args:
        specs: Specs of the trainings, or their fields, such as the result of `for_each`. A text is the name of a model
            for which no spec could be made.
        results: Result of each training, in the order of `specs`: a `JobResult` or its dict, a `NoResult`, or an
            exception.

    Raises:
        InvalidArgumentError: There are not as many results as specs, or a result is of another type.

    Example:
        >>> for line in summary(specs, results):
        ...     print(line)
    """
    if len(specs) != len(results):
        raise InvalidArgumentError(
            f"there are {len(specs)} specs and {len(results)} results: give one result per spec, and a NoResult for a "
            "training without a result"
        )
    return [ModelLine.of(spec, result) for spec, result in zip(specs, results, strict=True)]


def summary_headline(lines: Iterable[ModelLine]) -> str:
    """Return the number of jobs with each outcome, such as ``40 jobs: 36 promoted, 3 kept, 1 failed``."""
    counts = Counter(line.outcome for line in lines)
    total = counts.total()
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])
    return f"{total} job{'' if total == 1 else 's'}{parts and ': ' + parts}"


def summary_table(lines: Iterable[ModelLine]) -> list[dict[str, str]]:
    """Convert the lines of a summary to table rows of texts, for example for Prefect's ``create_table_artifact``."""
    columns = ("model", "outcome", "version", "metric", "value", "champion", "sentence")
    return [{name: figure(getattr(line, name)) for name in columns} for line in lines]


def _model_of(given: AnyJobSpec | Mapping[str, Any] | str) -> tuple[str, str | None]:
    """Return the name of the model that a job is about, and the name of the metric that decides about its promotion."""
    if isinstance(given, str):
        return given, None
    try:
        spec = parse_spec(given) if isinstance(given, Mapping) else given
    except InvalidArgumentError:
        assert isinstance(given, Mapping)
        # The spec is not legal, so the training of this spec failed. The summary still names the model and the metric,
        # which are read from the mapping.
        register = given.get("register")
        fields: Mapping[str, Any] = register if isinstance(register, Mapping) else {}
        metric = fields.get("metric")
        return str(fields.get("model", "(no name)")), metric if isinstance(metric, str) else None
    metric = None if spec.register_as is None else spec.register_as.metric
    return spec.registered_model or spec.run_config.job_id or spec.label, metric


def _facts(result: JobResult) -> list[str]:
    """Return sentences about what a job has predicted, searched, or trained in parts."""
    if result.output_path is not None:
        return [f"{result.rows or 0:,} rows with {result.model_uri}, written to {result.output_path}"]
    facts = []
    if search := result.search:
        params = ", ".join(f"{name}={figure(value)}" for name, value in search.best_params.items())
        trials = ", ".join(f"{count} {state}" for state, count in search.trials.items() if count)
        best = f"best {search.metric or 'value'} {figure(search.best_value)}"
        facts.append(one_line(f"{best} with {params} in trial {search.best_trial} ({trials})"))
    # A decision names the failed partitions itself.
    if counts := result.partitions:
        facts.append(
            (not result.decision and one_line(result.failed_text)) or f"models of {counts['succeeded']:,} partitions"
        )
    return facts if result.model_version else [*facts, "the model is not registered"]


_INDENT = " " * 10
"""Indent of the second line about a model. With this indent, the line begins below the model's name."""


@dataclass(frozen=True)
class Message:
    """A message for people, as plain text and as HTML.

    Attributes:
        subject: The message in one line.
        text: The whole message as plain text.
    """

    subject: str
    text: str

    @property
    def html(self) -> str:
        """Return the text as HTML, with a fixed-width font and all special characters escaped."""
        return f"<pre>{html.escape(self.text)}</pre>"


def summary_message(lines: Sequence[ModelLine]) -> Message:
    """Build a message for people about the trainings of one or more models.

    For one job, the subject names the outcome. For several jobs, the subject counts the outcomes. The text has a line
    per job with outcome, metric, the champion's metric and the reason, and below that line the metrics of the
    last ten versions.

    Args:
        lines: One line per job; see `shoal.models.model_summary`.

    Example:
        >>> print(summary_message(summary(specs, results)).text)
    """
    subject = _subject(lines[0]) if len(lines) == 1 else summary_headline(lines)
    parts = []
    for line in lines:
        parts.append(str(line))
        if comparison := _against_recent(line):
            parts.append(f"{_INDENT}{comparison}")
    return Message(subject, "\n".join(parts))


def _subject(line: ModelLine) -> str:
    version = "" if line.version is None else f" version {line.version}"
    value = "" if line.value is None else f", {line.metric or 'value'} {line.value:.6g}"
    return f"{line.outcome}: {line.model}{version}{value}"


def _against_recent(line: ModelLine) -> str:
    """Return a sentence about the metrics of earlier versions; promoted versions get an asterisk.

    For example: ``rmse of the last 2 versions, newest first: 18, 17.5* (* promoted; each on its own holdout)``.
    """
    known = [(each.promoted, value) for each in line.recent if (value := finite(each.value)) is not None]
    if line.metric is None or not known:
        return ""
    listed = ", ".join(f"{value:.6g}{'*' if promoted else ''}" for promoted, value in known)
    one = len(known) == 1
    text = f"{line.metric} of the last {'version' if one else f'{len(known)} versions, newest first'}: {listed}"
    notes = ["* promoted"] if any(promoted for promoted, _ in known) else []
    if not one:
        notes.append("each on its own holdout")
    if notes:
        text += f" ({'; '.join(notes)})"
    if (mine := finite(line.value)) is None:
        return text
    mode = best_mode(line.metric)
    beaten = sum(is_better(mine, value, mode) for _, value in known)
    return f"{text}; version {line.version} is better than {beaten} of {len(known)}"


@dataclass(frozen=True)
class StaleModel:
    """A model that has had no promotion for longer than a given time.

    Attributes:
        model: Name of the registered model.
        alias: Alias in MLflow's registry that a promotion sets.
        days: Days since the last promotion. For a model that was never promoted: days since its first job. None: no job
            for the model was ever submitted.
        version: Version that was promoted last; None if there was no promotion.
    """

    model: str
    alias: str
    days: float | None
    version: str | None

    def __str__(self) -> str:
        """Return the alert in one sentence."""
        if self.days is None:
            return f"{self.model}: there was no training and no promotion to {self.alias}"
        if self.version is None:
            return f"{self.model}: no promotion to {self.alias} since the first training {_lasted(self.days * 24)} ago"
        return f"{self.model}: no promotion to {self.alias} for {_lasted(self.days * 24)}, since version {self.version}"


@dataclass(frozen=True)
class WaitingJob:
    """A job that has waited in its pool's queue for longer than a given time.

    Attributes:
        job_id: Id of the job.
        pool: Name of the pool.
        holder: Name of the run that submitted the job.
        position: Place in the pool's queue, from 1.
        hours: Hours since the job was submitted.
    """

    job_id: str
    pool: str
    holder: str
    position: int
    hours: float

    def __str__(self) -> str:
        """Return the alert in one sentence."""
        return (
            f"job {self.job_id} of {self.holder} has waited for {_lasted(self.hours)}, "
            f"and is number {self.position} in the queue of pool {self.pool}"
        )


def stale_models(older_than: timedelta, models: Collection[str] | None = None) -> list[StaleModel]:
    """Return the models that have had no promotion for longer than a given time, sorted by name.

    The promotions and jobs are those in shoal's store (``$SHOAL_HOME`` or ``$SHOAL_STATE_URL``); MLflow is not asked. A
    model that was never promoted is found through its jobs, as long as the store contains them. Models of the same name
    in two registries count as one model.

    Args:
        older_than: Time since the last promotion from which a model is returned.
        models: Names of the models to check. A name without any job or promotion is returned too. None: all models.

    Raises:
        InvalidArgumentError: `older_than` is not a positive duration, or `models` is not a list.
    """
    bound = positive_seconds("older_than", older_than)
    if isinstance(models, str):
        raise InvalidArgumentError(f'models="{models}" is a text, but must be a list of names: ["{models}"]')
    now = time.time()
    known = _last_promotions(Store())
    stale = [
        StaleModel(model, alias, (now - since) / 86_400, version)
        for (model, alias), (since, version) in known.items()
        if now - since > bound and (models is None or model in models)
    ]
    missing = set(models or ()) - {model for model, _ in known}
    stale += [StaleModel(model, DEFAULT_ALIAS, None, None) for model in missing]
    return sorted(stale, key=lambda each: (each.model, each.alias))


def waiting_jobs(longer_than: timedelta, pool_name: str | None = None) -> list[WaitingJob]:
    """Return the jobs that have waited in a pool's queue for longer than a given time, the longest wait first.

    Args:
        longer_than: Waiting time from which a job is returned.
        pool_name: Name of the pool. None: all pools.

    Raises:
        InvalidArgumentError: `longer_than` is not a positive duration.
    """
    bound = positive_seconds("longer_than", longer_than)
    now = time.time()
    found = [
        WaitingJob(job.job_id, job.pool, job.holder, job.position, (now - job.created_at) / 3_600)
        for job in list_jobs(pool_name, states=(JobState.PENDING,), limit=MOST_LISTED)
        if job.position is not None and now - job.created_at > bound
    ]
    return sorted(found, key=lambda each: -each.hours)


def _lasted(hours: float) -> str:
    """Format a duration in the unit that suits it, such as ``40.0 days``, ``24.0 hours`` or ``3.5 minutes``."""
    for unit, length, least in (("days", 24, 48), ("hours", 1, 1), ("minutes", 1 / 60, 1 / 60)):
        if hours >= least:
            return f"{hours / length:.1f} {unit}"
    return f"{hours * 3_600:.0f} seconds"


def _last_promotions(store: Store) -> dict[tuple[str, str], tuple[float, str | None]]:
    """Return a dict from (model's name, alias) to the time and the version of the last promotion.

    For a model that was never promoted, the time is that of the model's first job, and the version is None.
    """
    found: dict[tuple[str, str], tuple[float, str | None]] = {}
    for promotion in confirmed_promotions(store):
        found.setdefault((promotion.model, promotion.alias), (promotion.created_at, promotion.version))
    for spec, created_at in store.rows(select(Job.spec, Job.created_at).order_by(Job.created_at)):
        if register := spec.get("register"):
            found.setdefault((register["model"], register["alias"]), (created_at, None))
    return found
