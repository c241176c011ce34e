"""Triggers: waits of deferred tasks, which run in Airflow's triggerer and take no slot of a worker."""
