"""Examples: retraining on real flights and two PyTorch networks, used by `make run`, the DAGs and the flows."""
