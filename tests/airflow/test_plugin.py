"""Airflow's plugin without a server: what it registers, what it imports, and who may see the page."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.models.dag import DagModel
from airflow.models.team import Team
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from httpx import Response

from shoal import history
from shoal.airflow import plugin
from shoal.airflow.page import _is_in_team, _may_end, _reader
from shoal.airflow.plugin import LazyApp, ShoalPlugin
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import JobState
from tests.support import ROOT, ui_systems


def airflow(home: Path, *command: str) -> str:
    environment = {**os.environ, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    ran = subprocess.run(
        [sys.executable, *command], env=environment, cwd=home, capture_output=True, text=True, check=True
    )
    return ran.stdout


LOADED = """
import json, sys
import airflow.plugins_manager as core
import airflow.sdk.plugins_manager as sdk
before = {*sys.modules}
names = [[plugin.name for plugin in manager._get_plugins()[0]].count("shoal") for manager in (core, sdk)]
errors = [manager._get_plugins()[1] for manager in (core, sdk)]
new = {name.partition(".")[0] for name in {*sys.modules} - before}
heavy = {"fastapi", "starlette", "sqlalchemy", "jinja2", "plotly", "ray", "mlflow", "pandas", "pyarrow", "numpy"}
print(json.dumps([names, errors, sorted(new & heavy), "shoal.ui" in sys.modules]))
"""


@pytest.mark.processes
def test_both_ways_of_installing_at_once_give_one_plugin_and_load_nothing_heavy(tmp_path):
    (tmp_path / "plugins").mkdir()
    shutil.copy(ROOT / "plugins" / "shoal_plugin.py", tmp_path / "plugins")

    last = airflow(tmp_path, "-c", LOADED).splitlines()[-1]

    assert last == "[[1, 1], [{}, {}], [], false]"


@pytest.mark.processes
def test_the_file_alone_registers_the_plugins(tmp_path):
    hidden = "import importlib.metadata as m; m.entry_points = lambda **_: []; "
    found = f"import runpy; found = runpy.run_path({str(ROOT / 'plugins' / 'shoal_plugin.py')!r}); "
    shown = "print(found['ShoalPlugin'].name, found['ShoalListeners'].name)"

    assert airflow(tmp_path, "-c", hidden + found + shown).splitlines()[-1] == "shoal shoal_listeners"


def test_the_menu_has_the_page_in_a_frame_and_in_a_tab():
    framed, tab = ShoalPlugin.external_views
    assert (framed["href"], framed["url_route"]) == ("/shoal/", "shoal")
    assert tab["href"] == "/shoal/"
    assert "url_route" not in tab


@pytest.fixture
def users(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[object, object]]:
    """What the auth manager answers for each user: whether the user may see, and may act. Users send their name."""
    from shoal.airflow import page

    answers: dict[str, tuple[object, object]] = {}

    async def get_user(request, _oauth, credentials):
        if credentials is None:
            raise HTTPException(401, "Not authenticated")
        name = credentials.credentials
        return SimpleNamespace(get_name=lambda: name, get_id=lambda: name)

    def answer(place: int):
        def asked(*, user, **_: object) -> object:
            found = answers[user.get_id()][place]
            if isinstance(found, Exception):
                raise found
            return found

        return asked

    manager = SimpleNamespace(
        is_authorized_view=answer(0),
        is_authorized_connection=answer(1),
        is_authorized_dag=lambda **_: False,
        get_authorized_dag_ids=lambda **_: set(),
    )
    monkeypatch.setattr(page, "get_user", get_user)
    monkeypatch.setattr(page, "get_auth_manager", lambda: manager)
    return answers


@pytest.fixture
def client(users) -> TestClient:
    """The page, mounted as Airflow mounts it."""
    app = FastAPI()
    app.mount("/shoal", LazyApp())
    return TestClient(app, headers={"accept": "application/json"})


def status(client: TestClient, user: str | None, path: str = "/shoal/") -> int:
    headers = {"authorization": f"Bearer {user}"} if user else {}
    return client.get(path, headers=headers).status_code


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((True, True), 200),
        ((True, False), 200),
        ((False, True), 403),
        ((None, True), 403),
        ((RuntimeError("no answer"), True), 403),
        ((True, RuntimeError("no answer")), 403),
    ],
)
def test_only_a_clear_yes_shows_the_page(client, users, answer, expected):
    users["anna"] = answer
    assert status(client, "anna") == expected
    assert status(client, "anna", "/shoal/static/page.js") == expected


def test_who_is_not_logged_in_is_refused_everywhere(client):
    for path in ("/shoal/", "/shoal/jobs/x", "/shoal/api/events", "/shoal/static/page.js"):
        assert status(client, None, path) == 401


def test_only_the_own_token_and_the_permission_let_a_user_act(client, users):
    from shoal.airflow.page import _csrf_token

    users["anna"], users["ben"], users["viewer"] = (True, True), (True, True), (True, False)

    def sweep(user: str, token: str, site: str = "same-origin") -> int:
        headers = {"authorization": f"Bearer {user}", "x-shoal-csrf": token, "sec-fetch-site": site}
        return client.post("/shoal/api/actions/sweep", headers=headers, json={}).status_code

    assert sweep("viewer", _csrf_token("viewer")) == 403
    assert sweep("anna", _csrf_token("ben")) == 403
    assert sweep("anna", "") == 403
    assert sweep("anna", _csrf_token("anna"), "cross-site") == 403
    assert sweep("anna", _csrf_token("anna")) == 200


@pytest.fixture
def stores(users, monkeypatch) -> dict[str | None, Store]:
    """The stores of two teams and of the API server, each with a pool of another name and a job of the same id."""
    from shoal.airflow import page

    members = {"anna": ["fraud"], "ben": ["ads", "fraud"], "vera": []}
    monkeypatch.setattr(
        page.get_auth_manager(),
        "is_authorized_team",
        lambda *, method, details, user: details.name in members[user.get_id()],
        raising=False,
    )
    monkeypatch.setattr(Team, "get_all_team_names", lambda: {"fraud", "ads", "other"})
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    users.update(dict.fromkeys(members, (True, True)))
    stores: dict[str | None, Store] = {None: Store()}
    for team in ("fraud", "ads"):
        url = f"sqlite:///{home() / team}.db"
        monkeypatch.setenv(f"AIRFLOW__{team.upper()}___SHOAL__STATE_URL", url)
        stores[team] = Store(url)
    for team, store in stores.items():
        job = ui_systems.job("train", f"pool-of-{team or 'all'}", JobState.RUNNING, 60, holder="cli:x@y")
        ui_systems.write(store, *ui_systems.pool(f"pool-of-{team or 'all'}"), job)
    return stores


PATHS = ("", "jobs/train", "jobs/none", "pools/pool-of-ads", "models", "history", "api/events", "static/page.js")


def test_a_user_sees_the_stores_of_the_own_teams_and_learns_nothing_of_others(client, stores):
    def page(user: str, path: str) -> Response:
        headers = {"authorization": f"Bearer {user}", "accept": "text/html"}
        return client.get(f"/shoal/{path}", headers=headers)

    def pools(user: str, path: str) -> set[str]:
        return set(re.findall("pool-of-\\w+", page(user, path).text))

    def menu(user: str, path: str) -> list[str]:
        return re.findall(r'href="([./]*(?:teams/\w+/)?)"[^>]*>(?:No team|fraud|ads)<', page(user, path).text)

    assert pools("anna", "teams/fraud/") == pools("ben", "teams/fraud/jobs?pool=") == {"pool-of-fraud"}
    assert pools("ben", "teams/ads/") == {"pool-of-ads"}
    assert pools("anna", "") == pools("vera", "") == {"pool-of-all"}
    assert (menu("anna", ""), menu("vera", "")) == (["./", "./teams/fraud/"], [])
    assert menu("ben", "teams/ads/") == ["./../../", "./../../teams/ads/", "./../../teams/fraud/"]
    assert menu("ben", "teams/ads/jobs/train")[0] == "../../../"
    for path in PATHS:
        refused = {(page(user, f"teams/{team}/{path}").status_code, page(user, f"teams/{team}/{path}").text)
                   for user, team in (("anna", "ads"), ("vera", "fraud"), ("anna", "nobodys"))}  # fmt: skip
        assert [code for code, _ in refused] == [404]
        assert client.get(f"/shoal/teams/ads/{path}").status_code == 401


def test_an_action_on_the_page_of_a_team_changes_only_its_store(client, stores):
    from shoal.airflow.page import _csrf_token

    def act(user: str, team: str, name: str, arguments: dict) -> int:
        headers = {
            "authorization": f"Bearer {user}",
            "x-shoal-csrf": _csrf_token(user),
            "sec-fetch-site": "same-origin",
        }
        return client.post(f"/shoal/teams/{team}/api/actions/{name}", headers=headers, json=arguments).status_code

    cancel = ("cancel", {"job_id": "train", "attempt": 1})
    assert [act("anna", "ads", *cancel), act("vera", "ads", *cancel)] == [404, 404]
    assert act("anna", "fraud", *cancel) == 200
    states = {team: attempts.load(store, Key("train", 1)).state for team, store in stores.items()}
    assert states == {None: "running", "fraud": "cancelled", "ads": "running"}
    recorded = {team: [line.actor for line in history.read(store=store)] for team, store in stores.items()}
    assert recorded == {None: [], "fraud": ["anna"], "ads": []}
    # The API server is no host of the team.
    assert act("anna", "fraud", "sweep", {}) == 400
    page = client.get("/shoal/teams/fraud/", headers={"authorization": "Bearer anna", "accept": "text/html"})
    assert 'data-action="sweep"' not in page.text


def test_the_page_of_a_team_shows_no_file_of_the_server(client, stores):
    """A team may give a job the id of another team's job, and any location to its results."""
    log = log_path(Key("train", 1))
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("a line of the server\n")
    headers = {"authorization": "Bearer ben", "accept": "text/html"}

    pages = {path: client.get(f"/shoal/{path}jobs/train", headers=headers).text for path in ("", "teams/ads/")}

    assert "a line of the server" in pages[""]
    assert "a line of the server" not in pages["teams/ads/"]
    assert "the log is on the pool's host" in unescape(pages["teams/ads/"])
    assert log.exists()


def test_a_store_that_does_not_answer_leaves_the_pages_of_the_others(client, stores, monkeypatch):
    monkeypatch.setenv("AIRFLOW__ADS___SHOAL__STATE_URL", "postgresql+psycopg://ads:hidden@127.0.0.1:9/ads")
    answer = client.get("/shoal/teams/ads/", headers={"authorization": "Bearer ben"})
    assert (answer.status_code, "hidden" in answer.text) == (503, False)
    assert status(client, "ben", "/shoal/teams/fraud/") == 200


def test_without_teams_there_is_only_the_own_store(client, stores, monkeypatch):
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "False")
    assert status(client, "anna", "/shoal/teams/fraud/") == 404
    assert "fraud" not in client.get("/shoal/", headers={"authorization": "Bearer anna", "accept": "text/html"}).text


@pytest.mark.processes
def test_the_settings_of_the_guide_name_the_store_of_each_team(tmp_path):
    guide = (ROOT / "docs" / "airflow-deployments.md").read_text()
    found = re.search(r"<!-- settings of stores -->\n```ini\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "airflow.cfg").write_text(found[1])
    code = "from shoal.airflow.deployment import *; print(has_teams(), *map(store_of, ['fraud', 'ads', 'other', None]))"

    said = airflow(tmp_path, "-c", code).splitlines()[-1]

    urls = (
        "postgresql+psycopg://fraud@db.example/fraud",
        "postgresql+psycopg://ads@db.example/shoal?options=-csearch_path%3Dads",
    )
    assert said.split() == ["True", *urls, "None", "None"]
    operations = (ROOT / "docs" / "operations.md").read_text()
    assert all(url in operations for url in urls)


def test_a_page_that_cannot_be_built_tells_strangers_nothing_and_is_built_later(monkeypatch):
    states = [RuntimeError("postgresql://me:secret@db"), FastAPI()]

    def build():
        found = states.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    client = TestClient(LazyApp(build))
    refused = client.get("/")
    assert (refused.status_code, "secret" in refused.text) == (503, False)
    assert client.get("/").status_code == 404

    monkeypatch.setattr(plugin, "has_extra", lambda: False)
    assert 'pip install "shoal[ui]"' in TestClient(LazyApp()).get("/").text


def test_concurrent_first_requests_build_one_page():
    built: list[FastAPI] = []

    def build() -> FastAPI:
        built.append(FastAPI())
        return built[-1]

    lazy = LazyApp(build)

    async def request() -> None:
        async def receive():
            return {"type": "http.request"}

        async def send(_message):
            pass

        await lazy({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}, receive, send)

    async def all_at_once() -> None:
        await asyncio.gather(*(request() for _ in range(20)))

    asyncio.run(all_at_once())
    assert len(built) == 1


class Manager:
    """An auth manager that lets everybody edit the runs and read the logs of the DAG "mine" of the team "ml"."""

    def is_authorized_dag(self, *, method, user, access_entity, details):
        known = ("PUT", DagAccessEntity.RUN), ("GET", DagAccessEntity.TASK_LOGS)
        return (method, access_entity) in known and details == DagDetails("mine", "ml")

    def is_authorized_team(self, *, method, user, details):
        return (method, details.name) == ("GET", "ml")


@pytest.mark.parametrize(("multi_team", "may"), [("True", [True, False]), ("False", [True, True])])
def test_the_pools_of_a_team_are_changed_by_its_members(monkeypatch, multi_team, may):
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", multi_team)
    assert [_is_in_team(Manager(), None, team) for team in ("ml", "ads")] == may


@pytest.mark.parametrize(
    ("holder", "may"),
    [
        ("airflow:tests:mine/run", True),
        ("airflow:tests:mine/run#score_lease_pool", True),
        ("airflow:mine/run", True),  # an older shoal has made the name
        ("airflow:tests:theirs/run", False),
        ("airflow:other:mine/run", None),
        ("prefect:mine/run", None),
        ("cli:me@here", None),
    ],
)
@pytest.mark.parametrize("otherwise", [True, False])
def test_jobs_and_leases_follow_their_dag(monkeypatch, holder, may, otherwise):
    monkeypatch.setattr(DagModel, "get_team_name", lambda dag_id: "ml")
    assert _may_end(Manager(), None, holder, otherwise=otherwise) is (otherwise if may is None else may)
    assert _reader(Manager(), None)(holder) is (may is not False)
