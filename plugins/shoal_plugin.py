"""Airflow's plugin with the page for pools, jobs and models, for a folder of plugins.

`pip install 'shoal[airflow,ui]'` needs no such file: Airflow finds the plugin through an entry point. Copy this file
into the folder if shoal is on the Python path and was not installed. Beside an installed shoal, the file does nothing,
because Airflow reports a plugin that it finds twice as an import error.
"""

from importlib.metadata import entry_points

if not any(entry.value.startswith("shoal.airflow.plugin:") for entry in entry_points(group="airflow.plugins")):
    from shoal.airflow.plugin import ShoalPlugin  # noqa: F401
