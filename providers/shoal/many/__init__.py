"""Call a function, or train a model, for each partition of a table, by one pass over the table.

For few, large models that are compared with their champions, see `shoal.jobs.for_each`, which makes a job per value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.distributors.call import SubmittedCall as SubmittedCall
    from shoal.kinds.partitions.partition_messages import PartitionContext as PartitionContext
    from shoal.kinds.partitions.partition_messages import get_context as get_context
    from shoal.kinds.partitions.partition_results import PartitionFailedError as PartitionFailedError
    from shoal.kinds.partitions.partition_results import PartitionResult as PartitionResult
    from shoal.kinds.partitions.partition_results import PartitionResults as PartitionResults
    from shoal.kinds.partitions.spec import PartitionsScalingConfig as PartitionsScalingConfig
    from shoal.many.calls import predict as predict
    from shoal.many.calls import run as run
    from shoal.many.calls import submit_run as submit_run
    from shoal.many.calls import submit_train as submit_train
    from shoal.many.calls import train as train

__getattr__ = lazy_exports(__name__)
