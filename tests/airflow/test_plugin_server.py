"""The page in a real Airflow, for a stranger, a viewer and an admin; over HTTP and in a browser. Two teams of this
Airflow have a store each.

The plugin is installed in both ways at once: by its entry point, and by the file in the folder of plugins.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from examples.local_airflow import LocalAirflow
from shoal import history
from shoal.errors import JobNotFoundError
from shoal.jobs.journal import attempts
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import JobState, Pool, PoolState
from tests.support import ROOT
from tests.support.browser import browser  # noqa: F401
from tests.support.postgres import Postgres
from tests.support.team_stores import team_stores
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(600)]

POOL = "shown-in-airflow"
PATHS = ("/shoal/", f"/shoal/pools/{POOL}", "/shoal/jobs/x", "/shoal/api/events", "/shoal/static/page.js")


FAILS = """
from airflow.sdk import dag, task

@dag
def fails_of_TEAM():
    @task
    def fail(dag_run=None):
        from shoal.state import Store
        from shoal.state.schema import Job, JobState
        holder = f"airflow:tests:{dag_run.dag_id}/{dag_run.run_id}"
        job = Job(id="of-the-run", attempt=1, pool="p", holder=holder, spec={}, state=JobState.RUNNING, endpoint={},
                  last_polled_at=0.0, created_at=0.0, task_key="another/-1")
        with Store().transaction() as session:
            session.add(job)
        raise RuntimeError("as a training that fails")
    fail()

fails_of_TEAM()
"""
"""A DAG whose run fails while a job of it goes on."""


@pytest.fixture(scope="module")
def urls(postgres: Postgres) -> Iterator[dict[str, str]]:
    """The stores of the teams."""
    with team_stores(postgres) as urls:
        yield urls


@pytest.fixture(scope="module")
def airflow(
    session_home: Path, tmp_path_factory: pytest.TempPathFactory, urls: dict[str, str]
) -> Iterator[LocalAirflow]:
    spec = PoolSpec(name=POOL, max_nodes=3)
    with Store().transaction() as session:
        session.add(
            Pool(
                name=POOL, spec=spec.model_dump(mode="json"), state=PoolState.DOWN, host="", min_nodes=1, max_nodes=3,
                epoch=1, next_node=0, created_at=0.0, touched_at=0.0,
            )
        )  # fmt: skip
    home = tmp_path_factory.mktemp("airflow")
    (home / "plugins").mkdir()
    shutil.copy(ROOT / "plugins" / "shoal_plugin.py", home / "plugins")
    settings = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,vera:viewer,ann:user:fraud",
        "AIRFLOW__CORE__MULTI_TEAM": "True",
        "AIRFLOW__SHOAL__DEPLOYMENT": "tests",
        **{f"AIRFLOW__{team.upper()}___SHOAL__STATE_URL": url for team, url in urls.items()},
    }
    airflow = LocalAirflow(home, [tmp_path_factory.mktemp(team) for team in urls], settings)
    bundles = json.loads(airflow.environment["AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"])
    for team, bundle in zip(urls, bundles, strict=True):
        bundle["team_name"] = team
        Path(bundle["kwargs"]["path"], "fails.py").write_text(FAILS.replace("TEAM", team))
    airflow.environment["AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"] = json.dumps(bundles)
    for command in (("db", "migrate"), ("teams", "sync")):
        subprocess.run([sys.executable, "-m", "airflow", *command], env=airflow.environment, check=True)
    with airflow:
        yield airflow
    with Store().transaction() as session:
        session.delete(session.get_one(Pool, POOL))


def token(airflow: LocalAirflow, user: str) -> str:
    password = json.loads((airflow.home / "passwords.json").read_text())[user]
    answer = httpx.post(f"{airflow.url}/auth/token", json={"username": user, "password": password}, timeout=60)
    return str(answer.raise_for_status().json()["access_token"])


class Caller:
    """What a user's browser sends, or what a stranger or an attacker sends by hand."""

    def __init__(self, airflow: LocalAirflow, user: str | None) -> None:
        cookies = {"_token": token(airflow, user)} if user else {}
        self._http = httpx.Client(base_url=airflow.url, cookies=cookies, timeout=60, headers={"accept": "text/html"})

    def page(self) -> httpx.Response:
        return self._http.get("/shoal/")

    def status(self, path: str) -> int:
        with self._http.stream("GET", path) as answer:  # the stream of events does not end by itself
            return answer.status_code

    def csrf(self) -> str:
        found = re.search(r'<meta name="csrf" content="([0-9a-f]{64})">', self.page().text)
        assert found is not None
        return found[1]

    def sweep(self, csrf: str, site: str = "same-origin") -> int:
        headers = {"x-shoal-csrf": csrf, "sec-fetch-site": site}
        return self._http.post("/shoal/api/actions/sweep", json={}, headers=headers).status_code


def sweepers() -> list[str]:
    return [line.actor for line in history.read(kind="swept")]


def test_the_plugin_is_registered_once_and_without_an_error(airflow):
    shown = [plugin for plugin in airflow.call("GET", "/plugins")["plugins"] if plugin["name"] == "shoal"]
    assert [plugin["fastapi_apps"][0]["url_prefix"] for plugin in shown] == ["/shoal"]
    assert airflow.call("GET", "/plugins/importErrors")["import_errors"] == []


def test_a_stranger_sees_nothing_a_viewer_sees_and_an_admin_acts(airflow):
    stranger, viewer, admin = Caller(airflow, None), Caller(airflow, "vera"), Caller(airflow, "admin")

    assert [stranger.status(path) for path in PATHS] == [401] * len(PATHS)
    assert stranger.sweep(admin.csrf()) == 401

    shown = viewer.page()
    assert shown.status_code == 200
    assert POOL in shown.text
    assert "data-action=" not in shown.text
    assert [viewer.sweep(viewer.csrf()), viewer.sweep(admin.csrf())] == [403, 403]

    assert 'data-action="sweep"' in admin.page().text
    assert [admin.sweep(""), admin.sweep(viewer.csrf()), admin.sweep(admin.csrf(), "cross-site")] == [403, 403, 403]
    assert sweepers() == []
    assert admin.sweep(admin.csrf()) == 200
    assert sweepers() == ["admin"]


def test_each_team_has_its_own_store_in_tasks_listener_and_page(airflow, urls):
    runs = {team: (f"fails_of_{team}", airflow.trigger(f"fails_of_{team}", {})) for team in urls}

    for team, run in runs.items():
        store = Store(urls[team])
        wait_until(lambda run=run: airflow.run_state(*run) == "failed", "the end of the run", seconds=300)
        wait_until(
            lambda store=store: attempts.latest(store, "of-the-run").state is JobState.CANCELLED,
            "the listener",
            seconds=120,
        )
        assert attempts.latest(store, "of-the-run").holder == f"airflow:tests:{run[0]}/{run[1]}"
    with pytest.raises(JobNotFoundError):
        attempts.latest(Store(), "of-the-run")

    paths = [f"/shoal/teams/{team}/jobs/of-the-run" for team in urls]
    for user, statuses in (("ann", [200, 404]), ("vera", [404, 404]), ("admin", [200, 200]), (None, [401, 401])):
        assert [Caller(airflow, user).status(path) for path in paths] == statuses
        assert Caller(airflow, user).status("/shoal/teams/none/") == (404 if user else 401)


def test_in_a_browser_the_frame_shows_the_page_and_only_an_admin_can_act(airflow, browser):  # noqa: F811
    before = len(sweepers())
    for user, may_act in (("vera", False), ("admin", True)):
        context = browser.new_context()
        context.add_cookies([{"name": "_token", "value": token(airflow, user), "url": airflow.url}])
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{airflow.url}/plugin/shoal")
        frame = page.frame_locator("iframe[title='Compute pools']")
        frame.get_by_text(POOL).first.wait_for()
        assert frame.locator("[data-action=sweep]").count() == may_act
        if may_act:
            frame.locator("[data-action=sweep]").first.click()
            with page.expect_response(re.compile("/shoal/api/actions/sweep")) as answer:
                frame.locator("#confirm-yes").click()
            assert answer.value.status == 200
        context.close()

    assert sweepers()[: len(sweepers()) - before] == ["admin"]
