"""PyTorch on a gang: one function or script in every worker, with torchrun's environment."""
