"""Submit training jobs to a pool, reattach to them from any process, and collect their results."""

from __future__ import annotations

from shoal.jobs.cleanup import CleanupReport, clean_up, sweep
from shoal.jobs.files.artifacts import load_results, load_training
from shoal.jobs.handle import JobHandle, JobStatus, JobTimeoutError
from shoal.jobs.many.for_each import for_each
from shoal.jobs.many.summary import ModelLine, NoResult, summary, summary_headline, summary_table
from shoal.jobs.results import ChampionResult, JobResult
from shoal.jobs.specs.base import Tracking
from shoal.jobs.specs.function import AnyJobSpec, FunctionJobSpec, FunctionRegister, parse_spec
from shoal.jobs.specs.prediction import PredictJobSpec, PredictResult
from shoal.jobs.specs.register import Register
from shoal.jobs.specs.training import JobSpec
from shoal.jobs.submission import attach, cancel, list_jobs, submit
from shoal.jobs.task_spec import skipping_if_unchanged, spec_of

__all__ = [
    "AnyJobSpec",
    "ChampionResult",
    "CleanupReport",
    "FunctionJobSpec",
    "FunctionRegister",
    "JobHandle",
    "JobResult",
    "JobSpec",
    "JobStatus",
    "JobTimeoutError",
    "ModelLine",
    "NoResult",
    "PredictJobSpec",
    "PredictResult",
    "Register",
    "Tracking",
    "attach",
    "cancel",
    "clean_up",
    "for_each",
    "list_jobs",
    "load_results",
    "load_training",
    "parse_spec",
    "skipping_if_unchanged",
    "spec_of",
    "submit",
    "summary",
    "summary_headline",
    "summary_table",
    "sweep",
]
