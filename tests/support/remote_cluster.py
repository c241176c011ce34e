"""A Ray cluster and an orchestrator that share nothing but the network: hosts, users and homes of their own.

The orchestrator has neither Ray nor a training library. PostgreSQL and an S3 server stand between them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import pandas as pd
import psycopg
import s3fs
from sqlalchemy import select

from examples.ports import free_port
from shoal.os_processes import process_stat
from shoal.state import Store
from shoal.state.schema import Job
from tests.support import postgres, remote_trainings
from tests.support.network_hosts import hosts, refusal
from tests.support.network_users import User, without_ray
from tests.support.postgres import Postgres
from tests.support.remote_trainings import Settings
from tests.support.waiting import wait_until
from tests.support.wheels import write_wheel

ROWS = 600
_PASSWORD = "of-the-drivers-role"
_CPUS = 4


def missing() -> str | None:
    """Why there can be no such cluster here; None where there can."""
    if why := refusal() or ("users of their own need root" if os.getuid() else None):
        return why
    return postgres.MISSING if not postgres.binaries() else None if shutil.which("uv") else "there is no uv"


@dataclass
class RayNode:
    """A node of the cluster, as its owner starts it."""

    user: User
    environment: Mapping[str, str]
    options: Sequence[str]
    log: Path
    process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start it; it takes seconds until it has joined."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={_CPUS}"]
        address = f"--node-ip-address={self.user.host.address}"
        own = ["--disable-usage-stats", "--object-store-memory=100000000", address]
        with self.log.open("ab") as log:
            self.process = self.user.popen([*ray, *own, *self.options], self.environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL it and all that runs on it, as when its host loses its power."""
        self.user.host.kill()
        if self.process is not None:
            self.process.wait(timeout=30)


@dataclass
class RemoteCluster:
    """The cluster, the orchestrator's user, and what stands between them.

    Attributes:
        head: The cluster's head.
        worker: Its other node.
        orchestrator: The user of the orchestrator.
        python: The orchestrator's Python.
        environment: Environment of the orchestrator's processes.
        database: The server with the store.
        store: The store, as its owner sees it.
        objects: The S3 server.
        alive: Returns the number of the cluster's nodes that are alive.
    """

    head: RayNode
    worker: RayNode
    orchestrator: User
    python: Path
    environment: dict[str, str]
    database: Postgres
    store: Store
    objects: s3fs.S3FileSystem
    alive: Callable[[], int]

    def start(self) -> None:
        """Start both nodes, and wait until they have joined."""
        self.join(self.head, nodes=1)
        self.join(self.worker, nodes=2)

    def join(self, node: RayNode, *, nodes: int = 2) -> None:
        """Start a node, and wait until the cluster has so many."""
        node.start()

        def joined() -> bool:
            # On a busy machine, Ray gives up the start, because its agents need more than 15 s.
            if node.process and node.process.poll() is not None:
                node.kill()
                node.start()
            return self.alive() == nodes

        wait_until(joined, f"node {nodes}, whose log is {node.log}", 300, every=0.5)

    @property
    def owner(self) -> User:
        """Return the user of the cluster, on the head."""
        return self.head.user

    def jobs(self, prefix: str = "") -> list[Job]:
        """Return the attempts of the jobs whose ids begin with a prefix, the oldest first."""
        with self.store.reading() as session:
            rows = session.scalars(select(Job).order_by(Job.created_at))
            return [row for row in rows if row.id.startswith(prefix)]

    def begin(self, job: str, *, kind: Callable[..., Trainings] | None = None, **settings: Any) -> Trainings:
        """Begin three trainings at once; `kind` is the class of what is returned."""
        folder = self.owner.home / job
        folder.mkdir()
        trainings = (kind or Trainings)(self, folder, Settings(str(folder), job, **settings))
        for path in (folder, *folder.iterdir()):
            os.chown(path, self.owner.uid, self.owner.uid)
        trainings.orchestrate()
        return trainings


@dataclass
class Trainings:
    """Three trainings that run at once, by their names: xgboost, lightgbm, pytorch."""

    cluster: RemoteCluster
    folder: Path
    settings: Settings
    program: subprocess.Popen[str] | None = None
    names = ("xgboost", "lightgbm", "pytorch")

    def __post_init__(self) -> None:
        self._permits: dict[str, int] = {}
        for name in self.names:
            pipe = self.folder / f"{name}.permits"
            os.mkfifo(pipe, 0o600)
            self._permits[name] = os.open(pipe, os.O_RDWR)  # kept open, because a pipe that nobody has open forgets

    def orchestrate(self) -> None:
        """Start the program that submits them and waits for them."""
        cluster = self.cluster
        self.program = cluster.orchestrator.popen(
            [str(cluster.python), remote_trainings.__file__, json.dumps(asdict(self.settings))],
            cluster.environment,
            stdout=subprocess.PIPE,
            stderr=self._log("wb"),
            text=True,
        )

    def workers(self, name: str) -> dict[int, int]:
        """Return the pids of a training's workers so far, with the rounds of each."""
        return {int(file.suffix[1:]): file.stat().st_size for file in self.folder.glob(f"{name}.[0-9]*")}

    def alive(self, name: str) -> list[int]:
        """Return the pids of a training's workers that are alive."""
        return [pid for pid in self.workers(name) if alive(pid)]

    def rounds(self, name: str) -> int:
        """Return how many rounds all workers of a training have done together."""
        return sum(self.workers(name).values())

    def do_rounds(self, more: int, names: Sequence[str] = names) -> None:
        """Let each training do so many more rounds on each of two workers, and wait until they are done."""
        self.expect_running()
        until = {name: self.rounds(name) + 2 * more for name in names}
        for name in names:
            os.write(self._permits[name], b"." * 2 * more)
        wait_until(
            lambda: self.expect_running() or all(self.rounds(name) >= until[name] for name in names),
            f"{more} rounds of {', '.join(names)}",
            400,
            every=0.5,
        )

    def hurry(self, *names: str) -> None:
        """Let trainings do their other rounds as fast as they can."""
        for name in names or tuple(self._permits):
            (self.folder / f"{name}.hurries").touch()
            permits = self._permits.pop(name)
            os.write(permits, b"." * remote_trainings.ROUNDS)  # for the workers that wait
            os.close(permits)

    def run_for(self, seconds: float) -> None:
        """Wait so many seconds, and fail as soon as the orchestrator's program ends."""
        until = time.monotonic() + seconds
        wait_until(lambda: self.expect_running() or time.monotonic() >= until, f"{seconds:g} s", 2 * seconds, every=0.5)

    def kill_orchestrator(self) -> None:
        """SIGKILL all that runs on the orchestrator's host."""
        assert self.program is not None
        self.cluster.orchestrator.host.kill()
        self.program.communicate(timeout=30)
        self.program = None

    def expect_running(self) -> None:
        """Fail if the orchestrator's program has ended."""
        assert self.program is None or self.program.poll() is None, self.said()

    def outcomes(self) -> dict[str, Any]:
        """Return what the orchestrator's program has printed at its end."""
        assert self.program is not None
        out, _ = self.program.communicate(timeout=400)
        assert self.program.returncode == 0, self.said()
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def said(self) -> str:
        """Return the end of what the orchestrator's program has written to stderr."""
        with self._log("rb") as log:
            return log.read()[-4000:].decode(errors="replace")

    def jobs(self) -> list[Job]:
        """Return all attempts of the trainings, the oldest first."""
        return self.cluster.jobs(self.settings.job)

    def _log(self, mode: str) -> IO[Any]:
        return Path(f"{self.folder}.log").open(mode)


@contextmanager
def remote_cluster() -> Iterator[RemoteCluster]:
    """Run the cluster, the store and the object store; nothing of them is left afterwards."""
    python, token = without_ray(), secrets.token_hex(32)
    # Ray's sockets need short paths, and pytest's folders are for root alone.
    base = Path(f"/tmp/sh-{secrets.token_hex(3)}")
    with ExitStack() as stack:
        base.mkdir(mode=0o755)
        stack.callback(shutil.rmtree, base)
        head, worker, own = stack.enter_context(hosts(3))
        for host in (head, worker, own):
            stack.callback(host.kill)
        here = f"{head.address.rpartition('.')[0]}.1"
        database = Postgres(max_connections=200, host=here)  # Airflow's processes keep some, too
        stack.callback(database.remove)
        database.run("CREATE DATABASE shoal")
        store = Store(database.url("shoal"))
        _limited_role(database)
        url = stack.enter_context(_object_store(python, here))
        storage = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_ENDPOINT_URL": url}
        objects = s3fs.S3FileSystem(
            key="key",
            secret="wJalrXUtnFEMI",
            client_kwargs={"endpoint_url": url, "region_name": "eu-west-1"},
            use_listings_cache=False,
        )
        _fill(objects)
        owner, orchestrator = User.new(head, 65534, base / "c"), User.new(own, 65533, base / "o")
        (owner.home / "wheels").mkdir(mode=0o755)
        write_wheel(owner.home / "wheels", "tidbit", "1.0", "ANSWER = 42")
        on_nodes = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(owner.file("token", token)),
            "SHOAL_STATE_URL": database.url("shoal", user="driver", password=_PASSWORD),
            "SHOAL_PYTHON": sys.executable,
        }
        gcs, api = f"{head.address}:6379", f"http://{head.address}:8265"
        as_head = ["--head", "--port=6379", f"--dashboard-host={head.address}", "--dashboard-port=8265"]
        options = f"address={api}&gcs={gcs}&token_file={orchestrator.file('token', token)}&token_over_http=allow"
        cluster = RemoteCluster(
            RayNode(owner, on_nodes, [*as_head, f"--temp-dir={owner.home}/r"], base / "head.log"),
            RayNode(replace(owner, host=worker), on_nodes, [f"--address={gcs}"], base / "worker.log"),
            orchestrator,
            python,
            {
                **storage,
                "AWS_REGION": "eu-west-1",
                "AWS_DEFAULT_REGION": "eu-west-1",
                "SHOAL_STATE_URL": database.url("shoal"),
                "POOL": f"ray://lab?{options}&max_nodes=2&cpus_per_node={_CPUS}",
            },
            database,
            store,
            objects,
            partial(_alive, api, token),
        )
        cluster.start()
        yield cluster


def alive(pid: int) -> bool:
    """Return whether a process of any host is alive."""
    return process_stat(pid) is not None


def _alive(api: str, token: str) -> int:
    """Return the number of nodes that are alive."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        answer = httpx.get(f"{api}/api/v0/nodes", headers=headers, timeout=10, trust_env=False).json()
    except (httpx.TransportError, ValueError):
        return 0
    return sum(row["state"] == "ALIVE" for row in answer["data"]["result"]["result"])


@contextmanager
def _object_store(python: Path, address: str) -> Iterator[str]:
    """An S3 server."""
    port = free_port()
    server = subprocess.Popen(
        [python.with_name("moto_server"), "-H", address, "-p", str(port)], stderr=subprocess.DEVNULL
    )
    url = f"http://{address}:{port}"

    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False).status_code < 500
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, "the S3 server", 60)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


def _limited_role(database: Postgres) -> None:
    """Create the role that the cluster's nodes get, as the docs say."""
    tables = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO driver"
    sequences = "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO driver"
    database.run(f"CREATE ROLE driver LOGIN PASSWORD '{_PASSWORD}'")
    with psycopg.connect(database.url("shoal").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(tables)
        connection.execute(sequences)


def _fill(objects: s3fs.S3FileSystem) -> None:
    objects.mkdir("bucket")
    for part in range(2):
        numbers = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        frame = pd.DataFrame(
            {"a": [float(i) for i in numbers], "b": [i % 5 for i in numbers], "y": [i % 2 for i in numbers]}
        )
        with objects.open(f"bucket/train/part-{part}.parquet", "wb") as file:
            frame.to_parquet(file)
