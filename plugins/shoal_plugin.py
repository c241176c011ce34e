"""shoal's two plugins for a folder of plugins: the page for pools, jobs and models, and the listener of failed runs.

`pip install 'shoal[airflow,ui]'` needs no such file: Airflow finds the plugins through entry points. Copy this file
into the folder if shoal is on the Python path and was not installed. Beside an installed shoal, the file does nothing,
because Airflow reports a plugin that it finds twice as an import error.
"""

from importlib.metadata import entry_points

if not any(entry.value.startswith("shoal.airflow.plugin:") for entry in entry_points(group="airflow.plugins")):
    from shoal.airflow.listeners.plugin import ShoalListeners  # noqa: F401
    from shoal.airflow.plugin import ShoalPlugin  # noqa: F401
