"""Provide the triggers with which deferred tasks wait in Airflow's triggerer, without a slot of a worker."""
