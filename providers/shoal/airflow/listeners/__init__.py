"""The plugin that Airflow loads in each of its processes: it applies shoal's settings, gives Airflow
an id, and listens to failed runs."""
