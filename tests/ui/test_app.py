"""The page without a browser: access, contents, actions, and the work of the store."""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pytest
from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from shoal import history
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.kinds.partitions.partition_messages import ModelBytes, Outcome
from shoal.kinds.partitions.result_files import ResultWriter, complete_files, manifest_of
from shoal.kinds.search import study_storage
from shoal.links import Link
from shoal.pool import bound_host
from shoal.pool.api import ComputePool, report_pools
from shoal.pool.backends.ray_http import RayHead
from shoal.pool.spec import PoolSpec
from shoal.state import Store, deployments
from shoal.state.schema import Job, JobState, Pool
from shoal.ui import job_view, model_view
from shoal.ui.access import TokenAccess, Viewer
from shoal.ui.app import EngineRequest, create_app, router, static_files
from shoal.ui.formats import RunLinks
from shoal.ui.live import StoreReader
from shoal.ui.pages import Pages, unhealed
from shoal.ui.server import below
from tests.support import ui_systems
from tests.support.browser import TOKEN
from tests.support.job_results import result_of
from tests.support.statements import statements
from tests.support.ui_systems import HOSTILE
from tests.support.waiting import wait_until

PAGES = ["/", "/jobs", "/models", "/history", "/pools/retrain", "/jobs/flights-2026-11-23"]


def csrf(client: TestClient) -> dict[str, str]:
    """The headers that the page's own script sends."""
    found = re.search('name="csrf" content="([^"]+)"', client.get("/").text)
    return {"x-shoal-csrf": found[1], "origin": "http://127.0.0.1:8000"}


def act(client: TestClient, name: str, arguments: dict, **headers: str):
    return client.post(f"/api/actions/{name}", json=arguments, headers={**csrf(client), **headers})


# --- access


def test_every_route_asks_for_access(stranger):
    fill = {"subject": "j", "name": "page.css", "job_id": "j", "attempt": 1}
    for route in router.routes:
        assert isinstance(route, APIRoute)
        path = route.path.format(**fill)
        for method in route.methods:
            answer = stranger.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 401, path
            assert "shoal ui" in answer.json()["error"]
    assert stranger.get("/openapi.json").status_code == stranger.get("/docs").status_code == 404


def test_a_wrong_token_and_a_forged_cookie_are_refused(stranger):
    assert stranger.get("/?token=guess").status_code == 401
    stranger.cookies.set("shoal_ui_8000", "guess")
    assert stranger.get("/").status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger):
    answer = stranger.get(f"/jobs?state=failed&token={TOKEN}")

    assert (answer.status_code, answer.headers["location"]) == (303, "./jobs?state=failed")
    assert TOKEN not in answer.headers["set-cookie"]
    assert answer.headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax")
    assert stranger.get("/jobs").status_code == 200
    hostile = stranger.get(f"/jobs/https:é%0d%0a?token={TOKEN}")
    assert (hostile.status_code, hostile.headers["location"]) == (303, "./https%3A%C3%A9%0D%0A")


def test_cookie_goes_only_to_paths_with_the_secret_prefix(store):
    app = create_app(access=TokenAccess(TOKEN, "cli:tester@host"))
    client = TestClient(below("s3cret", app), base_url="http://127.0.0.1:8000", follow_redirects=False)
    answer = client.get(f"/s3cret/jobs?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "./jobs")
    assert answer.headers["set-cookie"].endswith("; Path=/s3cret/; HttpOnly; SameSite=Lax")
    page = client.get("/s3cret/jobs")
    assert page.status_code == 200
    assert page.headers["referrer-policy"] == "no-referrer"
    assert client.get("/s3cret/static/page.css").status_code == 200
    assert client.get("/jobs").status_code == 404
    cookies = [
        client.build_request("GET", f"http://127.0.0.1:{where}").headers.get("cookie") for where in ("1/", "1/x")
    ]
    assert cookies == [None, None]


def test_the_policy_forbids_scripts_of_others(client):
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "unsafe" not in policy


def test_the_scripts_come_from_the_packages(client):
    for name, path in static_files().items():
        assert client.get(f"/static/{name}").content == path.read_bytes()
    assert client.get("/static/..%2Fapp.py").status_code == 404


@pytest.mark.parametrize("of_an_engine", [True, False])
def test_a_failed_job_of_an_engine_can_be_trained_again(store, of_an_engine):
    ui_systems.broken(store)
    ask = (lambda holder: EngineRequest("/api/x", {"of": holder}, "Sure?")) if of_an_engine else None
    app = create_app(access=TokenAccess(TOKEN, "cli:tester@host"), train_again=ask)
    with store.transaction() as session:
        job = session.query(Job).filter_by(state=JobState.FAILED).first()
        path, job.holder = f"{job.id}/{job.attempt}", "airflow:prod:dag/run"
        page = f"/jobs/{job.id}"
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        text = client.get(f"{page}?token={TOKEN}").text
        assert (f'data-train-again="../api/train-again/{path}"' in text) is of_an_engine
        answer = client.get(f"/api/train-again/{path}")
    app.state.reader.close()
    expected = {"path": "/api/x", "body": {"of": "airflow:prod:dag/run"}, "question": "Sure?"}
    assert answer.json() == (expected if of_an_engine else {"error": "this page is not part of a workflow engine"})


# --- contents


@pytest.mark.parametrize("system", ["idle", "busy", "broken"])
def test_every_page_shows_every_system(client, store, system):
    getattr(ui_systems, system)(store)
    paths = ["/", "/jobs", "/models", "/history", *(f"/pools/{each.status.name}" for each in report_pools(store))]
    paths += [f"/jobs/{job.job_id}" for job in client.app.state.reader.overview().jobs]

    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "</html>" in answer.text
        assert "style=" not in answer.text
        fragment = client.get(path, headers={"x-shoal-fragment": "1"}).text
        assert "</html>" not in fragment and "<h1" in fragment


def test_a_broken_pool_and_a_failed_job_come_first(client, store):
    ui_systems.broken(store)
    text = client.get("/").text

    assert text.index("Needs attention") < text.index("infinite values") < text.index('id="pools"')
    assert "No space left on device" in text
    job = client.get("/jobs/flights-2026-11-23").text
    assert job.index("infinite values") < job.index("End of the log") < job.index("12 infinite values</pre>")


AIRFLOW_A, AIRFLOW_B, FLOW_A, FLOW_B = "airflow:prod:dag/a", "airflow:prod:dag/b", "prefect:a", "prefect:b"
TASK, MAPPED, FLOW = {"task_key": "train/-1"}, {"task_key": "train/1"}, {"task_name": "flow.train", "label": "m"}


@pytest.mark.parametrize(
    ("later", "shown"),
    [
        (("first", 2, AIRFLOW_A, TASK, JobState.SUCCEEDED), []),
        (("first", 2, AIRFLOW_A, TASK, JobState.RUNNING), ["first"]),
        (("first", 2, AIRFLOW_A, TASK, JobState.CANCELLED), ["first"]),
        (("second", 1, AIRFLOW_B, TASK, JobState.SUCCEEDED), []),
        (("second", 1, AIRFLOW_A, TASK, JobState.SUCCEEDED), []),
        (("second", 1, AIRFLOW_B, TASK, JobState.FAILED), ["second"]),
        (("second", 1, AIRFLOW_B, MAPPED, JobState.SUCCEEDED), ["first"]),
        (("second", 1, "airflow:test:dag/b", TASK, JobState.SUCCEEDED), ["first"]),
        (("second", 1, "python:anna@host/1", {}, JobState.SUCCEEDED), ["first"]),
        (("second", 1, FLOW_B, FLOW, JobState.SUCCEEDED), []),
        (("second", 1, FLOW_B, FLOW | {"label": "n"}, JobState.SUCCEEDED), ["first"]),
        (("second", 1, FLOW_A, FLOW, JobState.SUCCEEDED), ["first"]),
    ],
)
def test_a_failure_needs_attention_until_a_later_attempt_or_run_of_its_task_has_succeeded(client, store, later, shown):
    job_id, attempt, holder, task, state = later
    first = {"holder": FLOW_A, **FLOW} if task.keys() == FLOW.keys() else {"holder": AIRFLOW_A, **TASK}
    ui_systems.write(
        store,
        ui_systems.job("first", "p", JobState.FAILED, 900, error="why", **first),
        ui_systems.job(job_id, "p", state, 600, attempt=attempt, holder=holder, error="why", **task),
    )

    text = client.get("/").text

    assert re.findall(r'<li data-key="job-(\w+)-\d"', text) == shown
    for name in shown:
        assert re.search(rf"{name}</a><span[^>]*>(dag.train|m by flow.train)</span>", text)
    assert "failed in 24 h" in text


def test_a_dismissed_failure_is_gone_for_all_users_until_the_task_fails_again(client, store):
    failed = {"holder": AIRFLOW_A, "error": "why", **TASK}
    ui_systems.write(
        store,
        ui_systems.job("older", "p", JobState.FAILED, 900, **failed),
        ui_systems.job("newer", "p", JobState.FAILED, 600, **failed),
        ui_systems.job("running", "p", JobState.RUNNING, 600),
    )
    other = StoreReader(store)
    assert [each.job_id for each in unhealed(other.overview().jobs)] == ["newer"]
    assert 'data-action="dismiss"' in client.get("/").text

    answer = act(client, "dismiss", {"job_id": "newer", "attempt": 1})

    assert answer.json() == {"done": "the failure of job newer was dismissed for all users"}
    assert "Needs attention" not in client.get("/").text
    other.read_again()
    assert list(unhealed(other.overview().jobs)) == []
    line = history.read(store=store)[0]
    assert (line.actor, line.kind, line.subject, line.pool) == ("cli:tester@host", "dismissed", "newer", "p")
    refused = act(client, "dismiss", {"job_id": "running", "attempt": 1})
    assert (refused.status_code, "only a failure can be dismissed" in refused.json()["error"]) == (400, True)
    ui_systems.write(store, ui_systems.job("newest", "p", JobState.FAILED, 300, **failed))
    other.read_again()
    assert [each.job_id for each in unhealed(other.overview().jobs)] == ["newest"]


def test_what_does_not_exist_is_not_found(client):
    for path in ("/pools/absent", "/jobs/absent", "/models/absent", "/absent"):
        assert client.get(path, headers={"accept": "text/html"}).status_code == 404


def test_a_job_and_a_pool_have_a_page_as_soon_as_they_exist(client, store):
    assert client.get("/").status_code == 200  # the store was read a moment ago
    ui_systems.broken(store)
    for path in ("/jobs/flights-2026-11-23", f"/pools/{report_pools(store)[0].status.name}"):
        assert client.get(path).status_code == 200, path


def test_the_trials_of_a_search_are_on_its_page_the_best_first(client, store, monkeypatch):
    key = ui_systems.search(store)
    found = study_storage.read_trials(store, key.job_id, 1)

    page = client.get("/jobs/a-search").text

    rows = re.findall(r'<th scope="row" data-label="Trial">(\d)</th>', page)
    best_first = sorted(found, key=lambda each: (each.value is None, each.value))
    assert rows == [str(each.number) for each in best_first]
    assert re.search(r"eta 0\.\d+, kind ", page)
    assert HOSTILE not in page
    plots = {each["kind"]: each for each in map(json.loads, map(unescape, re.findall('data-plot="([^"]+)"', page)))}
    complete = [each for each in found if each.value is not None]
    assert plots["history"]["x"] == plots["curves"]["series"][0]["x"] == [0, 2, 3, 4, 5]
    assert plots["history"]["y"] == [each.value for each in complete]
    assert plots["history"]["best"] == [*itertools.accumulate((each.value for each in complete), min)]
    assert [each["name"] for each in plots["slices"]["params"]] == ["eta", "kind"]
    assert plots["bars"]["names"][0] == "eta"
    assert sum(plots["bars"]["values"]) == pytest.approx(1)
    assert "install the extra" not in page
    monkeypatch.setattr(job_view, "find_spec", lambda name: None)
    ui_systems.write(store, ui_systems.job("later", "retrain", JobState.PENDING, 1))  # else the page is kept
    wait_until(lambda: "install the extra <code>tune" in client.get("/jobs/a-search").text, "a new page")


def test_the_jobs_are_filtered_and_come_in_pages(client, store):
    ui_systems.large(store, pools=3, jobs=120)

    def found(query: str) -> list[str]:
        return re.findall(r'data-key="(job-\d+)-1"', client.get(f"/jobs?{query}").text)

    assert found("") == [f"job-{number}" for number in range(50)]
    assert found("page=3") == [f"job-{number}" for number in range(100, 120)]
    assert found("page=99") == found("page=3") and found("page=x") == found("")
    assert found("state=failed") == ["job-50"]
    assert found("state=running") == ["job-0", "job-100"]
    assert found("pool=pool-01&age=day&id=-1") == [
        "job-1",
        "job-10",
        "job-13",
        "job-16",
        "job-19",
        *(f"job-{number}" for number in range(100, 120) if number % 3 == 1),
    ]
    assert found("holder=SCHEDULED") == found("")
    assert found("holder=absent") == []


def test_names_are_shown_as_text(client, store):
    ui_systems.hostile(store)
    for path in ("/", "/jobs", "/jobs/job-1", "/jobs/job-2", "/pools/retrain", "/models", f"/models/{HOSTILE}"):
        text = client.get(path).text
        assert "<img" not in text, path
        assert "onerror" in text, path


def test_a_version_that_waits_for_a_decision_is_shown_as_such(client, store, monkeypatch):
    said = "delays version 2 (rmse=2) waits for a decision"
    tags = {"shoal.job_id": "job-1", "shoal.reason": "waiting", "shoal.decision": said, "holdout.rmse.digest": "d"}
    version = SimpleNamespace(version="2", creation_timestamp=1000, run_id="r", source="s", tags=tags)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    monkeypatch.setattr(model_view, "_ask", lambda uri: ({"delays": [version]}, {"delays": {"champion": "1"}}))
    result = result_of(
        model_name="delays", model_version="2", decision={"reason": "waiting", "sentence": said}
    ).document()
    ui_systems.write(store, ui_systems.job("job-1", "retrain", JobState.SUCCEEDED, 60, result=result))

    page = client.get("/jobs/job-1").text
    assert "version 2 was registered for a later decision" in page and said in page
    assert 'href="../models/delays"' in page
    assert "version 2: waits for a decision" in client.get("/models").text
    page = client.get("/models/delays").text
    assert "waits for a decision</span>" in page and "not promoted" not in page


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_the_page_shows_the_worst_partitions_first(client, store, fresh_home, state):
    import hashlib

    import pyarrow as pa

    folder = fresh_home / "jobs" / "job-1" / "1" / "partitions"
    (folder / "results").mkdir(parents=True)
    writer = ResultWriter(str(folder / "results"), 0, pa.string())
    writer.expect(3)
    for key, seconds, error in (("fast", 1.0, ""), ("slow", 90.0, ""), (HOSTILE, 0.1, HOSTILE)):
        value = None if error else ModelBytes("pickle", b"")
        status = "failed" if error else "succeeded"
        writer.add(Outcome(key, status, 1, 10, seconds, {}, error, "", value))
    writer.close()
    content = manifest_of(complete_files(str(folder / "results")).values())
    (folder / "manifest.parquet").write_bytes(content)
    spec = {"framework": "partitions", "dataset": {"paths": ["x"]}, "by": "store", "function": "models:train"}
    result, digest = None, None
    if state is JobState.SUCCEEDED:
        digest = hashlib.sha256(content).hexdigest()
        partitions = {"succeeded": 2, "failed": 1}
        found = result_of(job_id="job-1", results_path=str(folder / "manifest.parquet"), partitions=partitions)
        result = found.document()
    row = ui_systems.job("job-1", "retrain", state, 60, spec=spec, result=result, results_digest=digest)
    ui_systems.write(store, row)

    page = client.get("/jobs/job-1").text
    assert "<img" not in page
    assert "2 succeeded</span>" in page and "1 failed</span>" in page
    assert page.index("onerror") < page.index("&#39;slow&#39;") < page.index("&#39;fast&#39;")
    assert "shoal many list job-1" in page


def test_the_pages_work_below_a_prefix(store):
    from fastapi import FastAPI

    ui_systems.busy(store)
    outer = FastAPI()
    outer.mount("/shoal", create_app(access=AnyoneMayLook()))
    client = TestClient(outer)
    assert 'href="./jobs"' in client.get("/shoal/").text
    text = client.get("/shoal/pools/retrain").text
    assert 'href="../static/page.css' in text
    assert client.get("/shoal/static/page.css").status_code == 200


# --- actions


class AnyoneMayLook:
    """A rule by which everybody may look and end what belongs to the DAG "mine", and do nothing else."""

    def may_end(self, holder: str, team: str | None) -> bool:
        return ":mine/" in holder

    def viewer(self, request: Request) -> Viewer:
        if request.headers.get("x-user") == "nobody":
            raise HTTPException(403, "not you")
        hidden = request.headers.get("x-hidden", "nothing")
        return Viewer(
            "viewer", False, "secret", may_end_some=lambda: True, may_end=self.may_end,
            may_read=lambda holder: hidden not in holder,
        )  # fmt: skip


def test_a_lease_is_released_and_the_record_names_the_user(client, store):
    ui_systems.busy(store)
    lease = ComputePool("retrain", store=store).describe().leases[0]

    answer = act(client, "release", {"pool": "retrain", "lease_id": lease.id})

    assert answer.json() == {"done": f"the lease of {lease.holder} was released"}
    assert lease.id not in {each.id for each in ComputePool("retrain", store=store).describe().leases}
    line = history.read(store=store)[0]
    assert (line.actor, line.kind, line.pool) == ("cli:tester@host", "released", "retrain")
    assert "cli:tester@host" in client.get("/history").text
    again = act(client, "release", {"pool": "retrain", "lease_id": lease.id})
    assert (again.status_code, "nothing was changed" in again.json()["error"]) == (400, True)


def test_a_block_of_a_flow_run_links_to_the_run(fresh_home, monkeypatch):
    monkeypatch.setenv("PREFECT_UI_URL", "https://prefect.example")
    expected = Link("Flow run", "https://prefect.example/runs/flow-run/6dba9de2")
    assert RunLinks(Store()).link("prefect:6dba9de2/1") == expected


def test_a_lease_and_a_job_link_to_the_airflow_of_their_run(client, store, monkeypatch):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://ours.example/")
    deployments.record(store, "theirs", "https://theirs.example", time.time())
    ui_systems.busy(store)
    holders = ("airflow:theirs:retrain/a:b+1", "airflow:unknown:retrain/run", "airflow:retrain/old")
    with store.transaction() as session:
        session.add_all(ui_systems.lease("retrain", holder, 1) for holder in holders)
        session.add(ui_systems.job("theirs", "retrain", JobState.RUNNING, 60, holder=holders[0]))
        task = {"task_key": "group.train/3", "label": "flights (2013)"}
        session.add(ui_systems.job("mapped", "retrain", JobState.RUNNING, 60, holder=holders[0], **task))

    for page, expected in (
        ("/pools/retrain", {"theirs.example/dags/retrain/runs/a%3Ab%2B1", "ours.example/dags/retrain/runs/old"}),
        ("/jobs/theirs", {"theirs.example/dags/retrain/runs/a%3Ab%2B1"}),
        ("/jobs/mapped", {"theirs.example/dags/retrain/runs/a%3Ab%2B1/tasks/group.train/mapped/3"}),
    ):
        links = set(re.findall(r'href="https://([^"]+/dags/retrain/[^"]+)"', client.get(page).text))
        assert links == expected
    for asked in ("2013)", "retrain.group.train[3]"):
        shown = client.get("/jobs", params={"id": asked}).text
        assert "flights (2013) by retrain.group.train[3]" in shown
        assert 'href="./jobs/theirs' not in shown


def test_a_waiting_job_is_cancelled(client, store):
    ui_systems.busy(store)

    answer = act(client, "cancel", {"job_id": "flights-emea", "attempt": 1})

    assert answer.json() == {"done": "job flights-emea was cancelled"}
    job = attempts.load(store, Key("flights-emea", 1))
    assert (job.state, job.error) == (JobState.CANCELLED, "cancelled by cli:tester@host on shoal's page")
    assert "cancelled by" in client.get("/jobs/flights-emea").text


def test_a_host_is_swept(client, store):
    assert act(client, "sweep", {}).json() == {"done": "nothing to sweep"}
    assert history.read(store=store)[0].actor == "cli:tester@host"


def test_the_error_of_an_action_is_shown_and_nothing_changes(client, store):
    ui_systems.busy(store)
    answer = act(client, "alter", {"pool": "retrain", "min_nodes": 7, "max_nodes": 6})
    assert answer.status_code >= 400 and answer.json()["error"]
    assert ComputePool("retrain", store=store).describe().max_nodes == 6


@pytest.mark.parametrize(
    "arguments",
    [{}, {"pool": "retrain"}, {"pool": 1, "lease_id": "x"}, {"pool": "retrain", "lease_id": "x", "more": 1}],
)
def test_wrong_arguments_are_refused(client, arguments):
    answer = act(client, "release", arguments)
    assert (answer.status_code, "needs pool (str), lease_id (str)" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-shoal-csrf": "guess"},
        {"origin": "http://evil.example"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_requests_of_other_sites_are_refused(client, store, headers):
    ui_systems.busy(store)
    answer = act(client, "cancel", {"job_id": "flights-emea", "attempt": 1}, **headers)
    assert answer.status_code == 403
    assert attempts.load(store, Key("flights-emea", 1)).state is JobState.PENDING


def test_a_user_may_end_what_belongs_to_a_dag_that_the_user_may_edit_and_change_no_pool(store):
    ui_systems.busy(store)
    client = TestClient(create_app(access=AnyoneMayLook()), base_url="http://127.0.0.1:8000")
    with store.transaction() as session:
        session.add(ui_systems.lease("retrain", "airflow:prod:mine/run", 1))
        for name, state in (("mine", JobState.PENDING), ("failed-mine", JobState.FAILED)):
            session.add(ui_systems.job(name, "retrain", state, 60, holder="airflow:prod:mine/run"))
        session.add(ui_systems.job("failed", "retrain", JobState.FAILED, 60))
    leases = {each.holder: each.id for each in ComputePool("retrain", store=store).describe().leases}
    mine = leases.pop("airflow:prod:mine/run")
    theirs = next(iter(leases.values()))

    assert set(re.findall(r'data-action="(\w+)"', client.get("/pools/retrain").text)) == {"release"}
    for name, arguments, status in (
        ("alter", {"pool": "retrain", "min_nodes": 1, "max_nodes": 9}, 403),
        ("sweep", {}, 403),
        ("cancel", {"job_id": "flights-emea", "attempt": 1}, 403),
        ("release", {"pool": "retrain", "lease_id": theirs}, 403),
        ("dismiss", {"job_id": "failed", "attempt": 1}, 403),
        ("dismiss", {"job_id": "failed-mine", "attempt": 1}, 200),
        ("cancel", {"job_id": "mine", "attempt": 1}, 200),
        ("release", {"pool": "retrain", "lease_id": mine}, 200),
    ):
        answer = act(client, name, arguments)
        assert answer.status_code == status, (name, answer.text)
        assert status == 200 or "you may not" in answer.json()["error"]
    assert attempts.load(store, Key("flights-emea", 1)).state is JobState.PENDING
    assert attempts.load(store, Key("mine", 1)).state is JobState.CANCELLED
    assert client.get("/", headers={"x-user": "nobody"}).status_code == 403
    for hidden, status in ((":mine/", 404), (":theirs/", 200)):
        headers = {"x-hidden": hidden}
        assert client.get("/jobs/mine", headers=headers).status_code == status
        for path in ("/", "/jobs", "/pools/retrain"):
            assert ("jobs/mine" in client.get(path, headers=headers).text) == (status == 200 and path != "/")


def test_the_page_asks_for_the_team_of_a_pool_and_of_a_job(client, store, monkeypatch):
    ui_systems.busy(store)
    with store.transaction() as session:
        pool = session.get_one(Pool, "retrain")
        pool.spec, pool.host = pool.spec | {"only_team": "fraud"}, ""
        job = session.get_one(Job, ("flights-emea", 1))
        job.team, job.queued_at, job.admitted_at = "fraud", 1.0, None  # it waits: its end needs no answer of the head
    alter = ("alter", {"pool": "retrain", "min_nodes": 1, "max_nodes": 9})
    cancel = ("cancel", {"job_id": "flights-emea", "attempt": 1})
    monkeypatch.setenv("SHOAL_TEAM", "ads")
    assert "guard rails against mistakes, not walls" in client.get("/pools/retrain").text
    assert "<dt>team</dt><dd>fraud</dd>" in client.get("/jobs/flights-emea").text
    for action in (alter, cancel):  # `shoal ui` acts for the team of its process
        answer = act(client, *action)
        assert answer.status_code == 403
        assert 'belongs to team "fraud", and this process acts for team "ads"' in answer.json()["error"]

    class OfTeams:
        """A rule that asks for the team of a pool and of a job."""

        def viewer(self, request: Request) -> Viewer:
            def is_in(team: str | None) -> bool:
                return team == request.headers["x-team"]

            return Viewer(
                "viewer", True, "secret", may_end_some=lambda: True, may_end=lambda holder, team: is_in(team),
                may_act_for=is_in, team="*",
            )  # fmt: skip

    other = TestClient(create_app(access=OfTeams()), base_url="http://127.0.0.1:8000", headers={"x-team": "ads"})
    for action in (alter, cancel):
        answer = act(other, *action)
        assert answer.status_code == 403
        assert 'of team "fraud"' in answer.json()["error"]
    for action in (alter, cancel):
        answer = act(other, *action, **{"x-team": "fraud"})
        assert answer.status_code == 200, answer.text


# --- the work of the store


def test_fifty_viewers_cost_the_store_no_more_than_one(store):
    ui_systems.large(store, pools=5, jobs=120)
    log = log_path(Key("job-1", 1))  # a log on this machine is read at once, others in the background
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    now = [0.0]

    def reads_of(viewers: int, running_job: str) -> int:
        reader = StoreReader(store, monotonic=lambda: now[0])
        pages = Pages(reader, version="1", clock=lambda: 0.0, monotonic=lambda: now[0])
        viewer = AnyoneMayLook().viewer(Request({"type": "http", "headers": []}))
        with statements("SELECT") as seen:
            for second in range(10):
                now[0] += 1.0
                if second == 5:
                    attempts.end(store, Key(running_job, 1), JobState.FAILED, 2e9, error="why")
                for _ in range(viewers):
                    for page, subject in (
                        ("overview", ""),
                        ("jobs", ""),
                        ("pool", "pool-01"),
                        ("job", "job-1"),
                        ("models", ""),
                    ):
                        pages.render(page, subject, {}, viewer=viewer, root="./", is_fragment=True)
        return len(seen)

    assert reads_of(50, "job-0") == reads_of(1, "job-100")


def test_the_work_for_a_first_view_does_not_grow_with_the_pools(store):
    def selects() -> int:
        with statements("SELECT") as seen:
            StoreReader(store).overview()
        return len(seen)

    ui_systems.large(store, pools=2, jobs=10)
    few = selects()
    ui_systems.write(store, *(row for number in range(20) for row in ui_systems.pool(f"more-{number}", size=1)))
    assert selects() == few


def test_a_change_is_noticed_with_one_query_and_no_change_reads_no_rows(store):
    ui_systems.busy(store)
    now = [0.0]
    reader = StoreReader(store, monotonic=lambda: now[0])
    first = reader.overview()

    now[0] += 1.0
    with statements("SELECT") as seen:
        assert reader.overview() is first
    assert len(seen) == 1

    attempts.end(store, Key("flights-2026-11-23", 1), JobState.FAILED, 2e9, error="why")
    now[0] += 1.0
    changed = reader.overview()
    assert changed.version == first.version + 1
    assert {job.job_id: job.state for job in changed.jobs}["flights-2026-11-23"] is JobState.FAILED
    assert len(changed.jobs) == len(first.jobs)


def test_the_metrics_of_a_job_are_read_once_for_all_viewers(store):
    ui_systems.busy(store)
    key = Key("flights-2026-11-23", 1)
    series = MetricSeries(key)
    series.log(0, {"eval-rmse": 2.5}, 0)
    batch = series.prepare()
    with store.transaction() as session:
        series.write(batch, session, session.get_one(Job, (key.job_id, key.attempt)))
    reader = StoreReader(store)
    [line] = [job for job in reader.overview().jobs if job.key == key]

    assert [point.values for point in reader.metrics(line)] == [{"eval-rmse": 2.5}]
    with statements("SELECT") as seen:
        reader.metrics(line)
    assert seen == []
    with statements("SELECT") as seen:
        reader.metrics(replace(line, progress=None))
    assert len(seen) == 1


def test_deleted_jobs_go_away(store):
    ui_systems.busy(store)
    now = [0.0]
    reader = StoreReader(store, monotonic=lambda: now[0])
    before = reader.overview()
    with store.transaction() as session:
        session.delete(session.get_one(Job, ("digits-cnn", 1)))
    now[0] += 1.0
    assert len(reader.overview().jobs) == len(before.jobs) - 1


def test_the_mark_of_the_store_is_the_same_on_both_databases(either_store):
    from shoal.jobs.status import job_lines, store_mark

    store = Store()
    before = store_mark(store)
    ui_systems.busy(store)
    after = store_mark(store)
    assert before != after == store_mark(store)
    assert after.jobs == len(job_lines(store)) == 8
    assert [line.job_id for line in job_lines(store, changed_since=2e9)] == [
        line.job_id for line in job_lines(store) if line.state in (JobState.PENDING, JobState.RUNNING)
    ]


def test_head_that_does_not_answer_delays_no_page(client, store, monkeypatch):
    monkeypatch.setitem(RayHead.__init__.__kwdefaults__, "timeout_s", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        api = f"http://127.0.0.1:{hung.getsockname()[1]}"
        pool, *rows = ui_systems.pool("lab", size=1)
        pool.spec = PoolSpec(name="lab", backend="ray", address=api).model_dump()
        pool.host, pool.host_id = "", None
        bound_host.record(PoolSpec.model_validate(pool.spec))
        node = ui_systems.node("lab", 0, endpoint={"api": api, "gcs": "127.0.0.1:1", "ray_node_id": "x"})
        job = ui_systems.job("on-lab", "lab", JobState.RUNNING, 60)
        ui_systems.write(store, pool, *rows, node, job)

        # The contents show that no page waits: a page that has waited would name the head's silence.
        text = client.get("/pools/lab").text
        assert "1 of 1</b> nodes ready" in text and "no answer" not in text
        assert "the pool&#39;s head is asked for the log" in client.get("/jobs/on-lab").text

        def shown() -> str:
            client.app.state.reader.read_again()
            return client.get("/pools/lab").text

        wait_until(lambda: "(no answer since the page&#39;s server was started)" in shown(), "the end of the request")
        assert "0 of 1</b> nodes ready" in shown()
        wait_until(
            lambda: "no line was written yet" in client.get("/jobs/on-lab").text, "the end of the request", every=0.2
        )


def test_a_store_that_does_not_answer_leaves_the_last_contents(client, store, monkeypatch):
    from shoal.errors import StoreUnreachableError
    from shoal.ui import live

    ui_systems.busy(store)
    assert "retrain" in client.get("/").text

    def fail(*_):
        raise StoreUnreachableError("the database does not answer")

    monkeypatch.setattr(live, "store_mark", fail)
    client.app.state.reader.read_again()
    text = client.get("/").text
    assert "the database does not answer" in text and "retrain" in text
