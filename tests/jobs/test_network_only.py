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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import psycopg
import pytest
import s3fs
from sqlalchemy import select

from shoal.examples.ports import free_port
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state import Store
from shoal.state.schema import Job, JobState
from tests.support import postgres
from tests.support.network_hosts import Host, hosts, refusal
from tests.support.network_users import User, without_ray
from tests.support.postgres import Postgres
from tests.support.waiting import wait_until
from tests.support.wheels import write_wheel

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

ROWS = 600
PASSWORD = "of-the-drivers-role"

TRAINS = """
import importlib.util, json, os
import pandas as pd
from shoal import ComputePool, RunConfig
from shoal.distributors import distributed
from shoal.data import DataConnector
from shoal.jobs import JobSpec, attach, load_training, submit

for missing in ("ray", "xgboost", "lightgbm", "torch"):
    assert importlib.util.find_spec(missing) is None, missing
pool = ComputePool(os.environ["POOL"]).up()
pool.scale(2)
PLACE = {"pool_name": "lab", "artifact_location": "s3://bucket/jobs"}

def boosted(framework, data, place=PLACE):
    spec = JobSpec(
        framework=framework, dataset=data, input_cols=("a", "b"), label_col="y", n_estimators=5, tracking=None,
        scaling_config={"num_workers": 2}, run_config=place,
    )
    result = submit(spec).wait(on_log=None)
    return {"rows": result.rows, "workers": result.num_workers, "bytes": len(load_training(result).model)}

rows = range(300)
frame = pd.DataFrame({"a": rows, "b": [i % 7 for i in rows], "y": [i % 2 for i in rows]})

@distributed(num_workers=2, remote=True, run_config=RunConfig(
    **PLACE, job_id="function", tracking=None, secret_env=["MY_PIN"], packages=["tidbit==1.0"],
    code=[os.environ["CODE"]], env={"UV_FIND_LINKS": os.environ["WHEELS"], "UV_OFFLINE": "1"},
))
def train():
    import features, tidbit, torch
    print("the pin is", os.environ["MY_PIN"])
    return {"answer": tidbit.ANSWER, "columns": features.COLUMNS, "sum": torch.ones(3).sum().item(),
            "reversed": os.environ["MY_PIN"][::-1]}

found = pool.preflight()
said = {
    "broken": [str(each) for each in found if each.status == "broken"],
    "checked": [each.name for each in found],
    "function": train.distributed(),
    "log": list(attach("function").logs()),
    "xgboost": boosted("xgboost", {"paths": ["s3://bucket/train"]}),
    "lightgbm": boosted("lightgbm", DataConnector.from_dataframe(frame).to_spec(), {"pool_name": "lab"}),
}
ComputePool("lab").down()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[list[Host]]:
    why = refusal() or ("users of their own need root" if os.getuid() else None)
    why = (
        why or (None if postgres.binaries() else postgres.MISSING) or (None if shutil.which("uv") else "there is no uv")
    )
    if why:
        pytest.skip(why)
    with hosts(3) as there:
        yield there


@contextmanager
def object_store(python: Path, address: str) -> Iterator[str]:
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


@contextmanager
def node(user: User, tag: str, environment: dict[str, str], *options: str) -> Iterator[None]:
    """A node of the Ray cluster, as its owner starts it."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    address = f"--node-ip-address={user.host.address}"
    with (user.home.parent / f"{user.host.namespace}.log").open("wb") as log:
        raylet = user.popen(
            [*command, "--object-store-memory=100000000", address, *options],
            {**environment, NODE_TAG: tag},
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            raylet.terminate()
            raylet.wait(timeout=60)


def test_everything_trains_on_a_cluster_that_shares_only_the_network(network, monkeypatch):
    head, worker, own = network
    here = f"{head.address.rpartition('.')[0]}.1"
    python, pin, tag = without_ray(), secrets.token_hex(8), f"foreign-{secrets.token_hex(4)}"
    # Ray's sockets need short paths, and pytest's folders are for root alone.
    base = Path(f"/tmp/sh-{secrets.token_hex(3)}")
    base.mkdir(mode=0o755)
    storage = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_REGION": "us-east-1"}
    storage["AWS_DEFAULT_REGION"] = "us-east-1"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        database = Postgres(host=here)
        stack.callback(database.remove)
        database.run("CREATE DATABASE shoal")
        store = Store(database.url("shoal"))
        monkeypatch.setenv("SHOAL_STATE_URL", database.url("shoal"))
        _limited_role(database)
        storage["AWS_ENDPOINT_URL"] = stack.enter_context(object_store(python, here))
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        _fill(storage)
        owner, orchestrator = User.new(head, 65534, base / "c"), User.new(own, 65533, base / "o")
        token = secrets.token_hex(32)
        (owner.home / "wheels").mkdir(mode=0o755)
        write_wheel(owner.home / "wheels", "tidbit", "1.0", "ANSWER = 42")
        cluster = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(owner.file("token", token)),
            "SHOAL_STATE_URL": database.url("shoal", user="driver", password=PASSWORD),
            "SHOAL_PYTHON": sys.executable,
        }
        gcs, api = f"{head.address}:6379", f"http://{head.address}:8265"
        as_head = ["--head", "--port=6379", f"--dashboard-host={head.address}", "--dashboard-port=8265"]
        stack.callback(processes.end_all, lambda: processes.of_node(tag, [owner.home], None), patience=30)
        stack.enter_context(node(owner, tag, cluster, *as_head, f"--temp-dir={owner.home}/r"))
        headers = {"Authorization": f"Bearer {token}"}

        def alive() -> int:
            try:
                answer = httpx.get(f"{api}/api/v0/nodes", headers=headers, timeout=10, trust_env=False).json()
            except (httpx.TransportError, ValueError):
                return 0
            return sum(row["state"] == "ALIVE" for row in answer["data"]["result"]["result"])

        wait_until(lambda: alive() == 1, "the head", 300)
        stack.enter_context(node(replace(owner, host=worker), tag, cluster, f"--address={gcs}"))
        wait_until(lambda: alive() == 2, "the second node", 300)
        options = f"address={api}&gcs={gcs}&token_file={orchestrator.file('token', token)}&token_over_http=allow"

        trains = orchestrator.popen(
            [str(python), "-c", TRAINS],
            {
                **storage,
                "SHOAL_STATE_URL": database.url("shoal"),
                "POOL": f"ray://lab?{options}&max_nodes=2",
                "MY_PIN": pin,
                "WHEELS": str(owner.home / "wheels"),
                "CODE": str(orchestrator.file("features.py", "COLUMNS = ['a', 'b']\n")),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = trains.communicate(timeout=900)
        with store.reading() as session:
            rows = list(session.scalars(select(Job)))

        assert trains.returncode == 0, err[-3000:] + str([(row.state, row.error) for row in rows])
        said: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert said["broken"] == []
        assert {"head: store", "worker: Ray", "head and worker"} <= set(said["checked"])
        assert said["xgboost"]["rows"] == ROWS and said["xgboost"]["workers"] == 2 and said["xgboost"]["bytes"] > 1000
        assert said["lightgbm"]["rows"] == 300 and said["lightgbm"]["bytes"] > 1000
        [first, other] = said["function"]
        assert first == other == {"answer": 42, "columns": ["a", "b"], "sum": 3.0, "reversed": pin[::-1]}
        log = "\n".join(said["log"])
        assert "installed tidbit==1.0" in log and "the pin is ***" in log and pin not in log
        assert [row.state for row in rows] == [JobState.SUCCEEDED] * 3
        assert all(row.needs_credentials for row in rows)
        kept = str([vars(row) for row in rows])
        assert pin not in kept and "wJalrXUtnFEMI" not in kept
        assert [row.sealed_credentials or row.driver_key for row in rows] == [None] * 3
        for home in (owner.home, orchestrator.home):
            assert list(home.glob(".shoal/credentials/*")) == []


def _limited_role(database: Postgres) -> None:
    """The role that the cluster's nodes get, as the docs say."""
    tables = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO driver"
    sequences = "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO driver"
    database.run(f"CREATE ROLE driver LOGIN PASSWORD '{PASSWORD}'")
    with psycopg.connect(database.url("shoal").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(tables)
        connection.execute(sequences)


def _fill(storage: dict[str, str]) -> None:
    s3 = s3fs.S3FileSystem(
        key=storage["AWS_ACCESS_KEY_ID"],
        secret=storage["AWS_SECRET_ACCESS_KEY"],
        client_kwargs={"endpoint_url": storage["AWS_ENDPOINT_URL"]},
    )
    s3.mkdir("bucket")
    for part in range(2):
        numbers = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        frame = pd.DataFrame(
            {"a": [float(i) for i in numbers], "b": [i % 5 for i in numbers], "y": [i % 2 for i in numbers]}
        )
        with s3.open(f"bucket/train/part-{part}.parquet", "wb") as file:
            frame.to_parquet(file)
