"""What does Airflow's plugin add to the start of Airflow's processes?

Each turn is a new process that loads Airflow's plugins, as the API server (core) and a worker (Task SDK) do when they
start. shoal's entry points are there, or are hidden. Airflow itself is imported before the clock starts. *page* is the
first request of the page, which imports and builds it. The request is refused, because nobody is logged in. The times
are CPU times, so that other work on the machine does not count.

Run it with ``python -m tests.benchmarks.plugin_imports``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median

from tests.benchmarks.report import table

CODE = """
import sys, time
process, hidden = sys.argv[1:]
if process == "worker":
    import airflow.sdk, airflow.sdk.plugins_manager as manager
    import airflow.sdk.execution_time.task_runner
else:
    import airflow.api_fastapi.app, airflow.plugins_manager as manager
for name in ("airflow._shared.module_loading", "airflow.sdk._shared.module_loading"):
    if name in sys.modules:
        sys.modules[name]._get_grouped_entry_points.cache_clear()
        metadata = sys.modules[name].metadata
if hidden == "hidden":
    found = metadata.distributions
    # The path's name is compared, because the name itself is in a file that Airflow does not read.
    metadata.distributions = lambda **at: (one for one in found(**at) if not one._path.name.startswith("shoal-"))
begin = time.process_time()
plugins, errors = manager._get_plugins()
took = time.process_time() - begin
assert not errors, errors
assert ("shoal" in [plugin.name for plugin in plugins]) is (hidden != "hidden")
page = 0.0
if process == "server" and hidden != "hidden":
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from airflow.api_fastapi.app import create_auth_manager
    app = FastAPI()
    create_auth_manager()
    app.mount("/shoal", next(plugin for plugin in plugins if plugin.name == "shoal").fastapi_apps[0]["app"])
    begin = time.process_time()
    assert TestClient(app).get("/shoal/").status_code == 401
    page = time.process_time() - begin
print(took, page)
"""


def _turn(process: str, hidden: str) -> tuple[float, float]:
    """The CPU seconds for loading the plugins, and for the first request of the page."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "AIRFLOW_HOME": home, "SHOAL_HOME": f"{home}/shoal"}
        environment["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
        ran = subprocess.run(
            [sys.executable, "-c", CODE, process, hidden],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    took, page = ran.stdout.splitlines()[-1].split()
    return float(took), float(page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time what Airflow's plugin adds.")
    parser.add_argument("--repeat", type=int, default=5, help="turns, of which the median counts (default 5)")
    repeat = parser.parse_args(argv).repeat
    rows = []
    for process in ("server", "worker"):
        turns: dict[str, list[tuple[float, float]]] = {"hidden": [], "shown": []}
        for hidden in [*turns] * repeat:
            turns[hidden].append(_turn(process, hidden))
        without, with_it = (median(took for took, _ in turns[hidden]) for hidden in ("hidden", "shown"))
        page = median(page for _, page in turns["shown"])
        rows.append(
            (
                {"server": "API server", "worker": "worker"}[process],
                f"{without * 1000:.0f}",
                f"{with_it * 1000:.0f}",
                f"{(with_it - without) * 1000:.0f}",
                f"{page * 1000:.0f}" if page else "-",
            )
        )
    print(table(("process", "plugins, ms", "with shoal's, ms", "added, ms", "page, ms"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
