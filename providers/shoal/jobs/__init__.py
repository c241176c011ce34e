"""Submit training jobs to a pool, reattach to them from any process, and collect their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.jobs.cleanup import CleanupReport as CleanupReport
    from shoal.jobs.cleanup import clean_up as clean_up
    from shoal.jobs.cleanup import retain as retain
    from shoal.jobs.cleanup import sweep as sweep
    from shoal.jobs.files.artifacts import load_results as load_results
    from shoal.jobs.files.artifacts import load_training as load_training
    from shoal.jobs.files.retention import DeletedAttempt as DeletedAttempt
    from shoal.jobs.files.retention import prune_jobs as prune_jobs
    from shoal.jobs.handle import JobHandle as JobHandle
    from shoal.jobs.handle import JobTimeoutError as JobTimeoutError
    from shoal.jobs.journal.tasks import FlowTask as FlowTask
    from shoal.jobs.journal.tasks import TaskTry as TaskTry
    from shoal.jobs.kind import parse_spec as parse_spec
    from shoal.jobs.many.for_each import for_each as for_each
    from shoal.jobs.many.summary import Message as Message
    from shoal.jobs.many.summary import ModelLine as ModelLine
    from shoal.jobs.many.summary import NoResult as NoResult
    from shoal.jobs.many.summary import StaleModel as StaleModel
    from shoal.jobs.many.summary import WaitingJob as WaitingJob
    from shoal.jobs.many.summary import stale_models as stale_models
    from shoal.jobs.many.summary import summary as summary
    from shoal.jobs.many.summary import summary_headline as summary_headline
    from shoal.jobs.many.summary import summary_message as summary_message
    from shoal.jobs.many.summary import summary_table as summary_table
    from shoal.jobs.many.summary import waiting_jobs as waiting_jobs
    from shoal.jobs.mlflow.later_promotion import promote_model as promote_model
    from shoal.jobs.mlflow.models import HistoryEntry as HistoryEntry
    from shoal.jobs.mlflow.models import ModelDetails as ModelDetails
    from shoal.jobs.mlflow.models import ModelStatus as ModelStatus
    from shoal.jobs.mlflow.models import SliceStatus as SliceStatus
    from shoal.jobs.mlflow.models import VersionStatus as VersionStatus
    from shoal.jobs.mlflow.models import describe_model as describe_model
    from shoal.jobs.mlflow.models import list_models as list_models
    from shoal.jobs.mlflow.models import model_history as model_history
    from shoal.jobs.mlflow.retention import DeletedVersion as DeletedVersion
    from shoal.jobs.mlflow.retention import ModelPruning as ModelPruning
    from shoal.jobs.mlflow.retention import prune_models as prune_models
    from shoal.jobs.mlflow.withdrawal import withdraw_promotion as withdraw_promotion
    from shoal.jobs.partitions.results import PartitionFailedError as PartitionFailedError
    from shoal.jobs.partitions.results import PartitionResult as PartitionResult
    from shoal.jobs.partitions.results import PartitionResults as PartitionResults
    from shoal.jobs.partitions.results import load_partitions as load_partitions
    from shoal.jobs.partitions.results import partitions_so_far as partitions_so_far
    from shoal.jobs.results import ChampionResult as ChampionResult
    from shoal.jobs.results import JobResult as JobResult
    from shoal.jobs.results import PromotionResult as PromotionResult
    from shoal.jobs.results import RecentVersion as RecentVersion
    from shoal.jobs.results import SearchSummary as SearchSummary
    from shoal.jobs.specs.base import AnyJobSpec as AnyJobSpec
    from shoal.jobs.specs.function import FunctionJobSpec as FunctionJobSpec
    from shoal.jobs.specs.function import FunctionRegister as FunctionRegister
    from shoal.jobs.specs.partitions import PartitionsJobSpec as PartitionsJobSpec
    from shoal.jobs.specs.partitions import PartitionsScalingConfig as PartitionsScalingConfig
    from shoal.jobs.specs.prediction import PredictJobSpec as PredictJobSpec
    from shoal.jobs.specs.prediction import PredictResult as PredictResult
    from shoal.jobs.specs.register import Register as Register
    from shoal.jobs.specs.training import JobSpec as JobSpec
    from shoal.jobs.specs.tuning import Range as Range
    from shoal.jobs.specs.tuning import TuneJobSpec as TuneJobSpec
    from shoal.jobs.status import JobStatus as JobStatus
    from shoal.jobs.submission import attach as attach
    from shoal.jobs.submission import cancel as cancel
    from shoal.jobs.submission import list_jobs as list_jobs
    from shoal.jobs.submission import submit as submit
    from shoal.jobs.task_spec import code_of as code_of
    from shoal.jobs.task_spec import models_spec_of as models_spec_of
    from shoal.jobs.task_spec import skipping_if_unchanged as skipping_if_unchanged
    from shoal.jobs.task_spec import spec_of as spec_of
    from shoal.training.tracking import Tracking as Tracking

__getattr__ = lazy_exports(__name__)
