"""Submit training jobs to a pool, reattach to them from any process, and collect their results."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.jobs.cleanup import CleanupReport, clean_up, retain, sweep
    from shoal.jobs.files.artifacts import load_results, load_training
    from shoal.jobs.files.retention import DeletedAttempt, prune_jobs
    from shoal.jobs.handle import JobHandle, JobTimeoutError
    from shoal.jobs.journal.tasks import TaskTry
    from shoal.jobs.many.alerts import StaleModel, WaitingJob, stale_models, waiting_jobs
    from shoal.jobs.many.for_each import for_each
    from shoal.jobs.many.message import Message, summary_message
    from shoal.jobs.many.summary import ModelLine, NoResult, summary, summary_headline, summary_table
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

_NAMES = {
    "shoal.jobs.cleanup": ("CleanupReport", "clean_up", "retain", "sweep"),
    "shoal.jobs.files.artifacts": ("load_results", "load_training"),
    "shoal.jobs.files.retention": ("DeletedAttempt", "prune_jobs"),
    "shoal.jobs.handle": ("JobHandle", "JobTimeoutError"),
    "shoal.jobs.journal.tasks": ("TaskTry",),
    "shoal.jobs.many.alerts": ("StaleModel", "WaitingJob", "stale_models", "waiting_jobs"),
    "shoal.jobs.many.for_each": ("for_each",),
    "shoal.jobs.many.message": ("Message", "summary_message"),
    "shoal.jobs.many.summary": ("ModelLine", "NoResult", "summary", "summary_headline", "summary_table"),
    "shoal.jobs.mlflow.models": (
        "HistoryEntry",
        "ModelDetails",
        "ModelStatus",
        "SliceStatus",
        "VersionStatus",
        "describe_model",
        "list_models",
        "model_history",
    ),
    "shoal.jobs.mlflow.retention": ("DeletedVersion", "ModelPruning", "prune_models"),
    "shoal.jobs.results": ("ChampionResult", "JobResult", "RecentVersion"),
    "shoal.jobs.specs.function": ("AnyJobSpec", "FunctionJobSpec", "FunctionRegister", "parse_spec"),
    "shoal.jobs.specs.prediction": ("PredictJobSpec", "PredictResult"),
    "shoal.jobs.specs.register": ("Register",),
    "shoal.jobs.specs.training": ("JobSpec",),
    "shoal.jobs.status": ("JobStatus",),
    "shoal.jobs.submission": ("attach", "cancel", "list_jobs", "submit"),
    "shoal.jobs.task_spec": ("check_spec", "skipping_if_unchanged", "spec_of"),
    "shoal.training.mlflow.options": ("Tracking",),
}
"""Public names of this package, by the module that defines them. A module is imported only when a program first uses
one of its names, because Airflow loads DAG files often, and a DAG file needs only few of the modules."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
