"""Distributed PyTorch training: run a function or script in every worker, with torchrun's environment variables."""
