"""Submit training jobs to a pool, reattach to them from any process, and collect their results."""

from __future__ import annotations

from shoal.jobs.cleanup import CleanupReport, clean_up, sweep
from shoal.jobs.files.artifacts import load_results, load_training
from shoal.jobs.function_spec import AnyJobSpec, FunctionJobSpec, FunctionRegister, parse_spec
from shoal.jobs.handle import JobHandle, JobStatus, JobTimeoutError
from shoal.jobs.predict_spec import PredictJobSpec, PredictResult
from shoal.jobs.spec import ChampionResult, JobResult, JobSpec, Register, Tracking
from shoal.jobs.submission import attach, cancel, list_jobs, submit
from shoal.jobs.task_spec import spec_of

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
    "PredictJobSpec",
    "PredictResult",
    "Register",
    "Tracking",
    "attach",
    "cancel",
    "clean_up",
    "list_jobs",
    "load_results",
    "load_training",
    "parse_spec",
    "spec_of",
    "submit",
    "sweep",
]
