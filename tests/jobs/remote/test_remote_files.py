"""Jobs on pools that others run: what travels with them, and what is refused because no node could reach it."""

from __future__ import annotations

import hashlib
import io
import os
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shoal.data import DataConnector, staged_data
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet import files
from shoal.errors import DataError, InvalidArgumentError, JobError, PoolUnreachableError
from shoal.jobs import (
    FunctionJobSpec,
    JobHandle,
    JobSpec,
    PredictJobSpec,
    Tracking,
    parse_spec,
    prune_jobs,
    remote_files,
    shipped_code,
    submission,
)
from shoal.jobs.driver.main import _without_package
from shoal.jobs.files import artifacts, storage
from shoal.jobs.files.storage import default_uri
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.reconcile.look import JobClient
from shoal.jobs.reconcile.rounds import start_if_room
from shoal.pool.backends.interface import Finding
from shoal.pool.backends.ray.backend import Cluster
from shoal.pool.spec import PoolSpec
from shoal.state import Store, home
from shoal.state.schema import Job, JobState
from shoal.training import locations
from shoal.training.boosting.request import TrainResult
from tests.support.fake_ray_head import FakeHead
from tests.support.job_results import result_of
from tests.support.job_store import POOL, change_pool

ARTIFACTS = "memory://bucket/jobs"


@pytest.fixture
def pool(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The pool is a Ray cluster of others."""

    def of_others(**options: Any) -> None:
        change_pool(store, PoolSpec(name=POOL, backend="ray", address="http://head:1", **options))

    of_others()
    monkeypatch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: [])
    return of_others


@pytest.fixture
def submit(head: FakeHead, pool: Callable[..., None]) -> Callable[..., JobHandle]:
    def submit(spec: Any, **options: Any) -> JobHandle:
        return submission.submit(spec, holder="airflow:dag/run", endpoint_of=lambda _: head.endpoint, **options)

    return submit


def row(handle: JobHandle) -> Job:
    return attempts.load(Store(), Key(handle.job_id, handle.attempt))


def function(**config: Any) -> FunctionJobSpec:
    given = {"pool_name": POOL, "artifact_location": ARTIFACTS, **config}
    return FunctionJobSpec(name="train", program=shipped_code.store(b"pickled"), tracking=None, run_config=given)


class TestPackage:
    def test_code_travels_with_the_job_and_is_checked_by_its_digest(self, submit, head, tmp_path):
        module = tmp_path / "features.py"
        module.write_text("COLUMNS = ['a']\n")

        handle = submit(function(code=[str(module)]))

        [[name, archive]] = head.packages.items()
        submitted = head.jobs[f"{handle.job_id}-1"]
        assert submitted.runtime_env == {"working_dir": f"gcs://{name.removeprefix('gcs/')}"}
        document = row(handle).spec
        assert str(home()) not in str(document)
        folder = tmp_path / "unpacked"
        zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
        spec = parse_spec(remote_files.unpacked(document, str(folder)))
        assert shipped_code.read(spec.program) == b"pickled"
        [code] = spec.run_config.code
        assert zipfile.ZipFile(io.BytesIO(shipped_code.read(code))).read("features.py") == module.read_bytes()
        Path(spec.program).write_bytes(b"another")
        with pytest.raises(JobError, match="was changed after it was stored"):
            shipped_code.read(spec.program)

    def test_each_attempt_has_a_package_and_an_attached_one_sends_none(self, submit, head):
        first = submit(function())
        assert submit(function()).attempt == 1
        assert len(head.packages) == 1
        first.cancel()

        assert submit(function()).attempt == 2
        assert len(head.packages) == 2

    def test_a_storage_that_refuses_the_canceller_does_not_keep_the_job(self, submit, monkeypatch):
        """The triggerer, for example, has no credentials."""
        handle = submit(function())

        def refused(*_: object) -> None:
            raise RuntimeError("no credentials")

        monkeypatch.setattr("shoal.jobs.reconcile.acts.artifacts.discard_unfinished", refused)

        assert handle.cancel() is True
        assert row(handle).state is JobState.CANCELLED

    def test_another_process_that_sends_a_queued_job_names_its_package(self, submit, head, store):
        handle = submit(function())
        sent = head.jobs.pop(f"{handle.job_id}-1")
        with store.transaction() as session:
            session.get_one(Job, (handle.job_id, 1)).admitted_at = None

        start_if_room(replace(handle.target, find_endpoint=lambda _: head.endpoint))

        assert head.jobs[f"{handle.job_id}-1"].runtime_env == sent.runtime_env

    def test_a_local_pool_gets_no_package(self, submit, head, store):
        change_pool(store, PoolSpec(name=POOL))

        handle = submit(function(artifact_location=None))

        assert head.packages == {}
        assert head.jobs[f"{handle.job_id}-1"].runtime_env == {}
        assert shipped_code.read(parse_spec(row(handle).spec).program) == b"pickled"

    def test_workers_do_not_start_in_the_drivers_folder(self):
        config = '{"runtime_env": {"working_dir": "gcs://x.zip", "env_vars": {"A": "1"}}, "metadata": {"job": "j"}}'

        assert _without_package(config) == '{"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {"job": "j"}}'


def training(**fields: Any) -> JobSpec:
    config = {"pool_name": POOL, "artifact_location": ARTIFACTS}
    given = {"dataset": DatasetSpec(paths=("s3://bucket/train",)), "input_cols": ("a",), "label_col": "y", **fields}
    return JobSpec(**{"tracking": None, "run_config": config, **given})


class TestReach:
    def test_a_job_that_names_only_uris_is_accepted(self, submit, monkeypatch):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")

        assert submit(training(tracking=Tracking())).attempt == 1

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            (training(dataset={"paths": ["s3://b/x", "/data/train"]}), r"the dataset /data/train is .*object store"),
            (training(dataset={"paths": ["file:///data/train"]}), "the dataset /data/train is on this machine"),
            (training(eval_set={"eval": {"paths": ["/data/eval"]}}), "the dataset /data/eval"),
            (training(run_config={"artifact_location": "/models"}), "artifact_location /models is .*s3://bucket"),
            (training(run_config={"artifact_location": "file:///models"}), "artifact_location /models is"),
            (training(tracking=Tracking(uri="sqlite:////x/runs.db")), r"the file /x/runs\.db is .*MLFLOW_TRACKING_URI"),
            (training(tracking=Tracking(uri="/x/mlruns")), "MLflow's database /x/mlruns, the file /x/mlruns is"),
            (
                PredictJobSpec(
                    model="/models/mine", dataset={"paths": ["s3://b/x"]}, output_path="s3://b/y",
                    tracking=None, run_config={"artifact_location": ARTIFACTS},
                ),
                r"the model /models/mine is .*models:/NAME@ALIAS",
            ),
            (
                PredictJobSpec(
                    model="s3://b/m", dataset={"paths": ["s3://b/x"]}, output_path="/out",
                    tracking=None, run_config={"artifact_location": ARTIFACTS},
                ),
                "output_path /out is on this machine",
            ),
        ],
    )  # fmt: skip
    def test_what_the_nodes_cannot_reach_is_refused_before_anything_is_sent(self, submit, head, spec, said):
        with pytest.raises(InvalidArgumentError, match=said) as caught:
            submit(spec.on_pool(POOL))

        assert "shared_folders" in str(caught.value)
        assert head.submissions == 0
        assert submission.list_jobs() == []

    def test_a_model_is_registered_only_where_the_submitter_can_read_it(self, submit, pool, head, monkeypatch):
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        register = {"model": "m", "metric": "rmse", "holdout": {"paths": ["s3://b/holdout"]}}
        spec = training(tracking=Tracking(), register=register)

        with pytest.raises(InvalidArgumentError, match=r"a database of their own, .* set MLFLOW_TRACKING_URI"):
            submit(spec)
        assert head.submissions == 0

        pool(shared_folders=str(home()))
        assert parse_spec(row(submit(spec)).spec).tracking.uri == default_uri()

    def test_shared_folders_are_allowed(self, submit, pool):
        pool(shared_folders="/data, /models")
        spec = training(dataset={"paths": ["/data/train"]}, run_config={"artifact_location": "/models/x"})

        assert submit(spec.on_pool(POOL)).attempt == 1
        # The artifacts lie beside the database (`artifacts_of`), so that the model that is registered is not lost.
        register = {"model": "m", "metric": "rmse", "holdout": {"paths": ["s3://b/holdout"]}}
        submit(training(tracking=Tracking(uri="sqlite:////models/runs.db"), register=register).on_pool(POOL))
        with pytest.raises(InvalidArgumentError, match="/database/train"):
            submit(training(dataset={"paths": ["/database/train"]}))
        with pytest.raises(InvalidArgumentError, match="/home/train"):
            submit(training(dataset={"paths": ["/data/../home/train"]}))


@pytest.fixture
def frame() -> DataConnector:
    files.unpacked_path.cache_clear()
    return DataConnector.from_dataframe(pd.DataFrame({"a": [1.0, 2.0], "y": [0, 1]}))


class TestFrames:
    def test_a_small_frame_travels_with_the_code_and_needs_no_artifact_location(
        self, submit, head, frame, tmp_path, monkeypatch
    ):
        train, evaluate = frame.random_split([0.5, 0.5], seed=1)
        given = training(dataset=train.to_spec(), eval_set={"eval": evaluate.to_spec()}, run_config={"pool_name": POOL})

        handle = submit(given)
        again = submit(given)

        assert (again.job_id, again.attempt) == (handle.job_id, 1)
        [[name, archive]] = head.packages.items()
        assert head.jobs[f"{handle.job_id}-1"].runtime_env == {"working_dir": f"gcs://{name.removeprefix('gcs/')}"}
        spec = parse_spec(row(handle).spec)
        assert remote_files.has_frames(spec) and spec.staged() == set()
        assert str(home()) not in str(row(handle).spec)
        environment = remote_files.for_workers({"py_modules": ["/code"]}, f"{handle.job_id}-1")
        assert environment == {"py_modules": ["/code", f"gcs://{name.removeprefix('gcs/')}"]}
        with pytest.raises(DataError, match="can be read only in this job"):
            DataConnector.from_spec(spec.dataset).to_arrow()
        zipfile.ZipFile(io.BytesIO(archive)).extractall(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert DataConnector.from_spec(spec.dataset).to_arrow() == train.to_arrow()
        assert DataConnector.from_spec(spec.eval_set["eval"]).to_arrow() == evaluate.to_arrow()

    def test_a_frame_that_was_changed_on_its_way_is_refused(self, submit, head, frame, tmp_path, monkeypatch):
        handle = submit(training(dataset=frame.to_spec(), run_config={"pool_name": POOL}))
        [archive] = head.packages.values()
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            packed.extractall(tmp_path)
            [file] = [tmp_path / each for each in packed.namelist()]
        file.write_bytes(file.read_bytes()[::-1])
        monkeypatch.syspath_prepend(str(tmp_path))

        with pytest.raises(DataError, match="was changed after it was sent with the job"):
            DataConnector.from_spec(parse_spec(row(handle).spec).dataset).to_arrow()

    def test_a_larger_frame_is_copied_to_the_artifact_location_and_goes_with_the_job(
        self, submit, pool, frame, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("shoal.jobs.remote_files.MAX_FRAME_BYTES", 100)
        pool(shared_folders=str(tmp_path))
        spec = training(dataset=frame.to_spec(), run_config={"artifact_location": str(tmp_path), "pool_name": POOL})

        handle = submit(spec)

        [dataset] = parse_spec(row(handle).spec).datasets()
        assert dataset.staging.startswith(f"{tmp_path}/staging/")
        assert DataConnector.from_spec(dataset).to_pandas()["a"].tolist() == [1.0, 2.0]
        assert staged_data.claims(dataset.staging) == {f"{handle.job_id}-1"}
        assert not staged_data.is_held(dataset.staging)
        again = submit(spec)
        assert (again.job_id, again.attempt) == (handle.job_id, 1)
        assert len(list((tmp_path / "staging").iterdir())) == 1
        handle.cancel()
        assert not Path(dataset.staging).exists()

    def test_a_larger_frame_without_a_place_that_the_nodes_reach_is_refused(self, submit, head, frame, monkeypatch):
        monkeypatch.setattr("shoal.jobs.remote_files.MAX_FRAME_BYTES", 100)

        with pytest.raises(InvalidArgumentError, match=r"the staged copy .*at most 8 MiB .*artifact_location"):
            submit(training(dataset=frame.to_spec(), run_config={"pool_name": POOL}))
        assert head.submissions == 0


class TestResultsInTheStore:
    def test_results_go_into_the_store_if_the_job_names_no_place_for_them(self, submit, store):
        handle = submit(function(artifact_location=None))

        spec = parse_spec(row(handle).spec)
        location = spec.run_config.artifact_location
        key = Key(handle.job_id, 1)
        claim, folder = artifacts.claim_of(store, key), artifacts.folder(key, location)
        artifacts.check(folder, claim, location)
        trained = TrainResult(
            model=b"bytes", eval_results={}, rounds=1, rows=1, num_workers=1, threads_per_worker=1, seconds=1.0,
            workers=(),
        )  # fmt: skip
        path, _ = artifacts.save(folder, claim, trained)

        result = result_of(job_id=handle.job_id, model_path=path, model_digest=hashlib.sha256(b"bytes").hexdigest())
        assert artifacts.load_training(result).model == b"bytes"
        newer = replace(claim, attempt=2)
        assert newer.check(folder) is True
        newer.take(folder)
        with pytest.raises(FileNotFoundError):
            artifacts.load_training(result)

    def test_they_end_with_the_rows_of_their_attempts(self, submit):
        handle = submit(function(artifact_location=None))
        other = submit(function(artifact_location=None, seed=7))
        for job in (handle.job_id, other.job_id):
            storage.write(f"{storage.IN_STORE}/{job}/1/results.pkl", b"1")
            storage.write(f"{storage.IN_STORE}/model/{job}/weights.pt", b"1")
        handle.cancel()

        prune_jobs(clock=lambda: time.time() + timedelta(days=40).total_seconds())

        fs, root = locations.filesystem(storage.IN_STORE)
        assert fs.find(root) == [f"jobs/model/{other.job_id}/weights.pt", f"jobs/{other.job_id}/1/results.pkl"]

    def test_a_result_that_is_too_large_is_refused(self, store, monkeypatch):
        monkeypatch.setattr("shoal.jobs.files.database_files.MAX_BYTES", 10)

        with pytest.raises(InvalidArgumentError, match=r"model\.ubj is .* set run_config\.artifact_location"):
            storage.write(f"{storage.IN_STORE}/job/1/model.ubj", b"more than ten")

    def test_a_worker_that_does_not_know_the_store_says_so(self, empty_home):
        with pytest.raises(JobError, match="SHOAL_STATE_URL on all nodes"):
            storage.write(f"{storage.IN_STORE}/model/job/weights.pt", b"1")

    def test_rows_of_a_query_are_not_written_into_the_store(self, submit, monkeypatch):
        monkeypatch.setenv("SHOAL_CONNECTION_LAB", "postgresql://host/db")
        dataset = {"sql": "SELECT 1 AS a, 0 AS y", "connection": "lab"}

        with pytest.raises(InvalidArgumentError, match=r"options sql.* set run_config\.artifact_location"):
            submit(training(dataset=dataset, run_config={"pool_name": POOL}))


class TestNodes:
    def test_nodes_that_can_run_no_job_are_told_before_it_is_sent_and_are_checked_until_they_can(
        self, submit, head, monkeypatch, caplog
    ):
        found = [
            Finding("head: store", "broken", "no pool", "set SHOAL_STATE_URL"),
            Finding("head: disk", "note", "1 GB"),
        ]
        checked = []
        monkeypatch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: checked.append(1) or found)

        with pytest.raises(InvalidArgumentError, match=r"head: store: no pool -> set SHOAL_STATE_URL.*shoal doctor"):
            submit(function())
        assert head.submissions == 0
        assert "head: disk: 1 GB" in caplog.text
        del found[0]
        assert submit(function()).attempt == submit(function()).attempt == 1
        assert len(checked) == 2


@pytest.fixture
def own_ca(tmp_path: Path) -> Any:
    """A head behind https, whose certificate is from an authority of its own."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", cert
    server.shutdown()
    server.server_close()


class TestHttps:
    def test_a_certificate_of_an_own_authority(self, own_ca, head):
        url, ca = own_ca
        endpoint = replace(head.endpoint, api=url)

        with pytest.raises(JobError, match="CERTIFICATE_VERIFY_FAILED"):
            JobClient.at(endpoint).status("job-1")
        assert JobClient.at(replace(endpoint, ca_path=ca)).status("job-1") is None

    def test_a_file_that_is_no_certificate(self, tmp_path, fresh_home):
        (tmp_path / "ca.pem").write_text("no certificate")
        for file in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
            spec = PoolSpec.parse(f"ray://lab?address=https://10.0.0.5:8265&ca_file={file}")
            with pytest.raises(PoolUnreachableError, match=f"ca_file={file} cannot be used.*PEM"):
                Cluster(spec).nodes()

    def test_a_token_goes_in_clear_only_to_this_machine_or_if_that_is_allowed_by_name(self):
        base = "ray://lab?token_file=/t&address="
        for fine in ("http://127.0.0.1:8265", "http://localhost:8265", "http://[::1]:8265", "https://10.0.0.5"):
            PoolSpec.parse(base + fine).check_token_is_private()
        PoolSpec.parse("ray://lab?address=http://10.0.0.5:8265").check_token_is_private()
        PoolSpec.parse(f"{base}http://10.0.0.5:8265&token_over_http=allow").check_token_is_private()

        with pytest.raises(InvalidArgumentError, match=r"without encryption.*https://.*token_over_http=allow"):
            PoolSpec.parse(f"{base}http://10.0.0.5:8265").check_token_is_private()


def test_the_driver_is_run_by_a_python_that_the_head_has(submit, head, tmp_path):
    submit(function())
    [job] = head.jobs.values()
    (tmp_path / "python").write_text("#!/bin/sh\necho head:$@\n")
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    elsewhere = job.entrypoint.replace(sys.executable, "/of/the/submitter/python")

    said = subprocess.run(["sh", "-c", elsewhere], env=environment, capture_output=True, text=True, check=True).stdout

    assert said.startswith("head:-P -m shoal.jobs.driver ")
