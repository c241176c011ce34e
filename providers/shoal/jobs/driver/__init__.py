"""The driver: the process that runs one attempt of a job on the pool's head."""
