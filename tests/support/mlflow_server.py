"""A real MLflow server in a process of its own, which can go away and come back at the same address."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path


class MlflowServer:
    """The server, which answers from the start.

    Args:
        database: MLflow's database.
        artifacts: Folder for artifacts.
    """

    def __init__(self, database: Path, artifacts: Path) -> None:
        variables = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}",
            "_MLFLOW_SERVER_REGISTRY_STORE": f"sqlite:///{database}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"file://{artifacts}",
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.mlflow_server"],
            env={**os.environ, **variables},
            cwd=Path(__file__).parents[2],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.uri = self._answer()

    def go_away(self) -> None:
        self._ask("away")

    def come_back(self) -> None:
        self._ask("back")

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "MLflow's server has ended"
        return line


def main() -> None:
    from mlflow.server import app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, app, threaded=True)
    port = server.port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    for command in sys.stdin:
        if command.strip() == "away":
            server.shutdown()
            thread.join()
            server.server_close()
        else:
            server = make_server("127.0.0.1", port, app, threaded=True)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
        print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
