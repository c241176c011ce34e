"""Send a job's own Python packages and code to its workers."""
