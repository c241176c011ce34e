"""Training and prediction inside the pool: gangs of workers and the engines of each library. Must not import jobs."""
