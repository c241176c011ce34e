"""Train with PyTorch on several workers: run a function or script in each, with torchrun's environment variables."""
