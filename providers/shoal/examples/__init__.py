"""The retraining on real flights that `make run`, the DAG and the flow share."""
