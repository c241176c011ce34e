"""A Ray cluster that is none of shoal's, in a process of its own: `ForeignCluster` starts, changes and ends it.

``python -m tests.pool.backends.foreign KIND WORKERS FOLDER`` is that process: it prints where the cluster is, does what
it reads line by line, and ends with its input. KIND is "static" (no monitor), "watched" (with the monitor that
`ray start --head` brings, which reports and starts nothing) or "v1" and "v2" (run by that version of Ray's autoscaler).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.pool.backends.local import processes
from shoal.pool.backends.local.processes import NODE_TAG

ROOT = Path(__file__).parents[3]
MOST_WORKERS = 3
_PREEMPTED = 2  # DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
_HEAD_ID = "f" * 51 + "00000"  # the fake provider's
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
_AUTOSCALED = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
    "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
    "RAY_NODE_TYPE_NAME": "ray.head.default",
}


class ForeignCluster:
    """One such cluster; as a context manager it is ended, and seen gone, at the end."""

    def __init__(self, kind: str = "static", workers: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="frn-"))  # short: Ray puts AF_UNIX sockets there
        self.token_file = self.folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_hex(32))
        self.tag = f"foreign-{secrets.token_hex(4)}"
        autoscaled = kind in ("v1", "v2")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHOAL_"))},
            **_ENVIRONMENT,
            **(environment or {}),
            **(_AUTOSCALED if autoscaled else {}),
            **({"RAY_enable_autoscaler_v2": "1"} if "v2" in kind else {}),
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": str(self.folder),
            NODE_TAG: self.tag,
        }
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pool.backends.foreign", kind, str(workers), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,  # a Ctrl-C at the terminal is the tests' to answer
        )
        said = self._process.stdout.readline()
        if not said:
            why = (self.folder / "log").read_text()[-2000:]
            self.end()
            raise RuntimeError(f"the foreign cluster did not come up: {why}")
        where = json.loads(said)
        self.api, self.gcs = where["api"], where["gcs"]

    def uri(self, name: str = "foreign", **options: Any) -> str:
        given = {"address": self.api, "gcs": self.gcs, "token_file": self.token_file, **options}
        return f"ray://{name}?" + "&".join(f"{key}={value}" for key, value in given.items() if value is not None)

    def lose(self) -> None:
        """SIGKILL for a worker's raylet."""
        self._order("lose")

    def drain(self) -> None:
        """Tell Ray that a worker will shut down soon, as `ray drain-node` does."""
        self._order("drain")

    def join(self) -> None:
        """One more worker."""
        self._order("join")

    def _order(self, what: str) -> None:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == what

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Its processes, then its folder; Ray's agents and workers may outlive their raylet by a minute."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            left = processes.end_all(lambda: processes.of_node(self.tag, [self.folder], None), patience=30)
            self._process.stdout.close()
            self._log.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        assert left == []

    def __enter__(self) -> ForeignCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _autoscaling_config(folder: Path) -> str:
    commands = ["setup", "initialization", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"]
    config = {
        "cluster_name": "foreign",
        "max_workers": MOST_WORKERS,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 10.0,
        "provider": {
            "type": "external",
            "module": "tests.pool.backends.loopback_provider.LoopbackProvider",
            "head_node_id": _HEAD_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "foreground_node_launch": True,
            "worker_liveness_check": False,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "small": {
                "resources": {"CPU": 1, "object_store_memory": 80 * 2**20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": MOST_WORKERS,
            },
        },
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
    }
    path = folder / "autoscaling.json"
    path.write_text(json.dumps(config))
    return str(path)


def _node(head: bool, **params: Any) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    given = RayParams(
        node_ip_address="127.0.0.1",
        num_cpus=1,
        num_gpus=0,
        object_store_memory=80 * 2**20,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
        include_log_monitor=False,
        **params,
    )
    return Node(given, head=head, shutdown_at_exit=False, spawn_reaper=True)


def main() -> None:
    kind, workers, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    autoscaled = kind in ("v1", "v2")
    head = _node(
        True,
        node_name="z-head",  # not the first by name: it is listed first because it is the head
        temp_dir=str(folder),
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=0,
        no_monitor=kind == "static",
        autoscaling_config=_autoscaling_config(folder) if autoscaled else None,
    )
    os.environ.pop("RAY_OVERRIDE_NODE_ID_FOR_TESTING", None)
    nodes: list[Any] = []

    def join() -> None:
        nodes.append(_node(False, node_name=f"worker-{len(nodes)}", gcs_address=head.gcs_address))

    for _ in range(workers):
        join()
    try:
        print(json.dumps({"api": f"http://{head.webui_url}", "gcs": head.gcs_address}), flush=True)
        for line in sys.stdin:
            if line.strip() == "join":
                join()
            elif line.strip() == "lose":
                nodes[-1].all_processes["raylet"][0].process.kill()
            elif line.strip() == "drain":
                head.get_gcs_client().drain_node(nodes[0].node_id, _PREEMPTED, "spot", 2**62)
            print(line.strip(), flush=True)
    finally:
        for node in [*nodes, head]:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        os._exit(0)  # Ray's threads may hang at exit


if __name__ == "__main__":
    main()
