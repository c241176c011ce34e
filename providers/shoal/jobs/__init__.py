"""Submit training jobs to a pool, reattach to them from any process, and collect their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.jobs.cleanup import CleanupReport, clean_up, retain, sweep
    from shoal.jobs.files.artifacts import load_results, load_training
    from shoal.jobs.files.retention import DeletedAttempt, prune_jobs
    from shoal.jobs.handle import JobHandle, JobTimeoutError
    from shoal.jobs.journal.tasks import TaskTry
    from shoal.jobs.many.alerts import StaleModel, WaitingJob, stale_models, waiting_jobs
    from shoal.jobs.many.for_each import for_each
    from shoal.jobs.many.summary import (
        Message,
        ModelLine,
        NoResult,
        summary,
        summary_headline,
        summary_message,
        summary_table,
    )
    from shoal.jobs.mlflow.models import (
        HistoryEntry,
        ModelDetails,
        ModelStatus,
        SliceStatus,
        VersionStatus,
        describe_model,
        list_models,
        model_history,
    )
    from shoal.jobs.mlflow.retention import DeletedVersion, ModelPruning, prune_models
    from shoal.jobs.results import ChampionResult, JobResult, RecentVersion
    from shoal.jobs.specs.function import AnyJobSpec, FunctionJobSpec, FunctionRegister, parse_spec
    from shoal.jobs.specs.prediction import PredictJobSpec, PredictResult
    from shoal.jobs.specs.register import Register
    from shoal.jobs.specs.training import JobSpec
    from shoal.jobs.status import JobStatus
    from shoal.jobs.submission import attach, cancel, list_jobs, submit
    from shoal.jobs.task_spec import check_spec, skipping_if_unchanged, spec_of
    from shoal.training.mlflow.options import Tracking

__all__ = [
    "AnyJobSpec",
    "ChampionResult",
    "CleanupReport",
    "DeletedAttempt",
    "DeletedVersion",
    "FunctionJobSpec",
    "FunctionRegister",
    "HistoryEntry",
    "JobHandle",
    "JobResult",
    "JobSpec",
    "JobStatus",
    "JobTimeoutError",
    "Message",
    "ModelDetails",
    "ModelLine",
    "ModelPruning",
    "ModelStatus",
    "NoResult",
    "PredictJobSpec",
    "PredictResult",
    "RecentVersion",
    "Register",
    "SliceStatus",
    "StaleModel",
    "TaskTry",
    "Tracking",
    "VersionStatus",
    "WaitingJob",
    "attach",
    "cancel",
    "check_spec",
    "clean_up",
    "describe_model",
    "for_each",
    "list_jobs",
    "list_models",
    "load_results",
    "load_training",
    "model_history",
    "parse_spec",
    "prune_jobs",
    "prune_models",
    "retain",
    "skipping_if_unchanged",
    "spec_of",
    "stale_models",
    "submit",
    "summary",
    "summary_headline",
    "summary_message",
    "summary_table",
    "sweep",
    "waiting_jobs",
]

__getattr__ = lazy_exports(__name__)
