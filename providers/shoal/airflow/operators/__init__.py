"""Provide operators that scale compute pools, lease nodes, train, predict, and clean up.

Each operator calls one function of shoal's API. The leases and jobs belong to the DAG run (the holder), so that a later
task of the run can find and end them.
"""

from shoal.airflow.operators.model_operators import CheckModelsOperator as CheckModelsOperator
from shoal.airflow.operators.model_operators import ModelAlertError as ModelAlertError
from shoal.airflow.operators.model_operators import PromoteModelOperator as PromoteModelOperator
from shoal.airflow.operators.nodes import CleanupPoolOperator as CleanupPoolOperator
from shoal.airflow.operators.nodes import LeasePoolOperator as LeasePoolOperator
from shoal.airflow.operators.nodes import ScaleClusterOperator as ScaleClusterOperator
from shoal.airflow.operators.nodes import SweepPoolsOperator as SweepPoolsOperator
from shoal.airflow.operators.training import BatchPredictOperator as BatchPredictOperator
from shoal.airflow.operators.training import DistributedTrainOperator as DistributedTrainOperator
from shoal.airflow.operators.training import ManyModelsOperator as ManyModelsOperator
from shoal.airflow.operators.training import TuneOperator as TuneOperator
