"""Load shoal's two Airflow plugins from a plugins folder: the page for pools, jobs and models, and the listener for
failed runs.

After `pip install 'shoal[airflow,ui]'`, this file is not needed, because Airflow finds the plugins through entry
points. Copy this file into the plugins folder only if shoal is on the Python path without an installation. If shoal is
installed, the file does nothing, because Airflow would report a plugin that is loaded twice as an import error.
"""

from importlib.metadata import entry_points

if not any(entry.value.startswith("shoal.airflow.plugin:") for entry in entry_points(group="airflow.plugins")):
    from shoal.airflow.listeners import ShoalListeners  # noqa: F401
    from shoal.airflow.plugin import ShoalPlugin  # noqa: F401
