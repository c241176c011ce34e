"""Run the trials of a search for parameters in the workers of one job."""
