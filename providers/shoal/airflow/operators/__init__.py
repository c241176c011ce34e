"""Provide operators that scale compute pools, lease nodes, train, predict, and clean up.

Each operator calls one function of shoal's API. The leases and jobs belong to the DAG run (the holder), so that a later
task of the run can find and end them.
"""

from shoal.airflow.operators.models import CheckModelsOperator, ModelAlertError
from shoal.airflow.operators.nodes import (
    CleanupPoolOperator,
    LeasePoolOperator,
    ScaleClusterOperator,
    SweepPoolsOperator,
)
from shoal.airflow.operators.prediction import BatchPredictOperator
from shoal.airflow.operators.training import DistributedTrainOperator

__all__ = [
    "BatchPredictOperator",
    "CheckModelsOperator",
    "CleanupPoolOperator",
    "DistributedTrainOperator",
    "LeasePoolOperator",
    "ModelAlertError",
    "ScaleClusterOperator",
    "SweepPoolsOperator",
]
