"""Provide the examples of `make run`, the DAGs and the flows: a retraining on flights, and two PyTorch networks."""
