"""Jobs that run a function or script in every worker."""
