"""Programs that run the examples of this repository on an Airflow or a Prefect of their own (`make run`)."""
