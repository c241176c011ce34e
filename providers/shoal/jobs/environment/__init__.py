"""Python packages and code that a job brings with it for its workers."""
