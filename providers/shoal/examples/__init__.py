"""Provide the code of `make run` and of the example DAGs and flows: flight delay models, and two PyTorch networks."""
