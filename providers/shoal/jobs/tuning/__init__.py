"""Search for parameters: the study in the store, and the trials that the workers of one job run."""
