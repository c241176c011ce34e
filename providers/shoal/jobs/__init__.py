"""Submit training jobs to a pool, reattach to them from any process, and collect their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.jobs.cleanup import CleanupReport as CleanupReport
    from shoal.jobs.cleanup import clean_up as clean_up
    from shoal.jobs.cleanup import sweep as sweep
    from shoal.jobs.files.artifacts import load_results as load_results
    from shoal.jobs.files.artifacts import load_training as load_training
    from shoal.jobs.files.retention import DeletedAttempt as DeletedAttempt
    from shoal.jobs.files.retention import prune_jobs as prune_jobs
    from shoal.jobs.handle import JobHandle as JobHandle
    from shoal.jobs.handle import JobTimeoutError as JobTimeoutError
    from shoal.jobs.journal.owners import FlowTask as FlowTask
    from shoal.jobs.journal.owners import TaskTry as TaskTry
    from shoal.jobs.kind import parse_spec as parse_spec
    from shoal.jobs.register import Register as Register
    from shoal.jobs.results import ChampionResult as ChampionResult
    from shoal.jobs.results import JobResult as JobResult
    from shoal.jobs.results import PromotionResult as PromotionResult
    from shoal.jobs.results import RecentVersion as RecentVersion
    from shoal.jobs.results import SearchSummary as SearchSummary
    from shoal.jobs.spec import AnyJobSpec as AnyJobSpec
    from shoal.jobs.status import JobStatus as JobStatus
    from shoal.jobs.submission import attach as attach
    from shoal.jobs.submission import cancel as cancel
    from shoal.jobs.submission import list_jobs as list_jobs
    from shoal.jobs.submission import submit as submit
    from shoal.kinds.for_each import for_each as for_each
    from shoal.kinds.function.spec import FunctionJobSpec as FunctionJobSpec
    from shoal.kinds.function.spec import FunctionRegister as FunctionRegister
    from shoal.kinds.partitions.partition_results import PartitionFailedError as PartitionFailedError
    from shoal.kinds.partitions.partition_results import PartitionResult as PartitionResult
    from shoal.kinds.partitions.partition_results import PartitionResults as PartitionResults
    from shoal.kinds.partitions.partition_results import load_partitions as load_partitions
    from shoal.kinds.partitions.partition_results import partitions_so_far as partitions_so_far
    from shoal.kinds.partitions.spec import PartitionsJobSpec as PartitionsJobSpec
    from shoal.kinds.partitions.spec import PartitionsScalingConfig as PartitionsScalingConfig
    from shoal.kinds.prediction.spec import PredictJobSpec as PredictJobSpec
    from shoal.kinds.prediction.spec import PredictResult as PredictResult
    from shoal.kinds.search.spec import Range as Range
    from shoal.kinds.search.spec import TuneJobSpec as TuneJobSpec
    from shoal.kinds.task_spec import code_of as code_of
    from shoal.kinds.task_spec import models_spec_of as models_spec_of
    from shoal.kinds.task_spec import skipping_if_unchanged as skipping_if_unchanged
    from shoal.kinds.task_spec import spec_of as spec_of
    from shoal.kinds.training.spec import JobSpec as JobSpec
    from shoal.models.catalog import retain as retain
    from shoal.models.model_summary import Message as Message
    from shoal.models.model_summary import ModelLine as ModelLine
    from shoal.models.model_summary import NoResult as NoResult
    from shoal.models.model_summary import StaleModel as StaleModel
    from shoal.models.model_summary import WaitingJob as WaitingJob
    from shoal.models.model_summary import stale_models as stale_models
    from shoal.models.model_summary import summary as summary
    from shoal.models.model_summary import summary_headline as summary_headline
    from shoal.models.model_summary import summary_message as summary_message
    from shoal.models.model_summary import summary_table as summary_table
    from shoal.models.model_summary import waiting_jobs as waiting_jobs
    from shoal.training.tracking import Tracking as Tracking

__getattr__ = lazy_exports(__name__)
