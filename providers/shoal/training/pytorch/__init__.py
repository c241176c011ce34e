"""Train with PyTorch: run a function or script in several workers, with the environment variables of torchrun."""
