"""Programs that run the examples of this repository: in plain Python, or on an Airflow or a Prefect of their own."""
