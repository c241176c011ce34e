"""The plugin that Airflow loads in each of its processes: it applies shoal's settings, and listens to failed runs."""
