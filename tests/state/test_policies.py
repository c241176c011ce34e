"""The printed SQL on a real PostgreSQL: a team's role works on its own rows, and can change none of other teams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from shoal import jobs
from shoal.data.spec import DatasetSpec
from shoal.errors import InvalidArgumentError, StoreError, TeamError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.specs.training import JobSpec
from shoal.jobs.teams import require_for_version
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.lease_renewal import PoolLease
from shoal.state import Store, policies
from shoal.state.schema import (
    Base,
    JobMetrics,
    JobState,
    OperationKind,
    OperationState,
    Promotion,
    PromotionState,
    StoredFile,
    StudyLog,
)
from tests.support import ui_systems
from tests.support.postgres import PASSWORD, Postgres

TEAMS = ("fraud", "ads", "Anna Müller")
OPEN = {"locks", "airflow_deployments", "history"}
"""Tables whose rows belong to no team."""

Acting = Callable[..., Store]


@pytest.fixture
def acting(on_postgresql: Postgres, tiny, monkeypatch) -> Iterator[Acting]:
    """Make this process act with the role of a team, and say that it acts for a team."""
    owner = Store()
    url = make_url(owner.url)
    sql = policies.policies(TEAMS)
    roles = ["shoal_reconciler", *map(policies.role_of, TEAMS)]
    for _ in range(2):  # it may be applied again
        on_postgresql.run(sql, url.database)
    for role in roles:
        on_postgresql.run(f"ALTER ROLE \"{role}\" PASSWORD '{PASSWORD}'")

    def act(role: str, team: str) -> Store:
        of_role = url.set(username=f"shoal_{role}").render_as_string(hide_password=False)
        monkeypatch.setenv("SHOAL_STATE_URL", of_role)
        monkeypatch.setenv("SHOAL_TEAM", team)
        return Store()

    yield act
    monkeypatch.setenv("SHOAL_STATE_URL", owner.url)
    monkeypatch.setenv("SHOAL_TEAM", "*")
    for status in list_pools():
        ComputePool(status.name).down()
    for role in roles:
        on_postgresql.run(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"', url.database)


def job_of(store: Store, team: str | None, pool: str) -> Key:
    """A job that its driver runs."""
    spec = JobSpec(dataset=DatasetSpec(paths=("/data",)), input_cols=("a",), label_col="y", fingerprint="1")
    job = attempts.ask(
        store, Order(f"job-of-{team}", pool, "airflow:a:dag/run", spec.document(), {}, None, team=team), 0.0
    )
    return Key(job.id, job.attempt)


def test_a_team_works_on_its_pool_and_the_role_of_another_team_cannot_change_it(acting):
    store = acting("fraud", "fraud")
    pool = ComputePool("local://ours?only_team=fraud&max_nodes=3").up()
    assert pool.scale(2)
    lease = pool.lease(1)
    assert isinstance(lease, PoolLease)
    key = job_of(store, "fraud", "ours")

    acting("ads", "fraud")  # the role decides, whatever the process says
    theirs = ComputePool("ours")
    for request in (
        lambda: theirs.scale(1),
        lambda: theirs.lease(1),
        lambda: theirs.alter(max_nodes=2),
        lambda: theirs.set_quota("ads", max_nodes=4),
        theirs.down,
        theirs.delete,
        lambda: ComputePool("ours", holder="test:ads").withdraw(pool.operation_id or "", "not mine"),
        lambda: require_for_version(Store(), key, "test:ads"),
        ComputePool("ours", holder=pool.holder).release,
        lambda: jobs.attach(key.job_id).cancel(),
    ):
        with pytest.raises(TeamError, match="the database lets only this team's role change it"):
            request()
    with pytest.raises(StoreError, match=r"row-level security policy.*the row would belong to another team"):
        job_of(Store(), "ads", "ours")
    with pytest.raises(StoreError, match="row-level security policy"):
        ComputePool("local://stolen?only_team=fraud").up()
    assert jobs.attach(key.job_id).status().state is JobState.PENDING  # they may see it
    assert jobs.sweep() == []

    store = acting("fraud", "fraud")
    assert attempts.state(store, key) is JobState.PENDING
    assert [len(pool.describe().active), pool.describe().max_nodes, pool.describe().quotas] == [2, 3, {}]
    attempts.start(store, key, {}, 1.0)
    attempts.note_run(store, key, "run")
    assert attempts.end(store, key, JobState.SUCCEEDED, 2.0, result={})
    lease.release()
    pool.down()
    pool.delete()


def test_a_pool_of_no_team_is_shared_by_the_roles(acting):
    acting("fraud", "fraud")
    fraud = ComputePool("local://shared?max_nodes=2", holder="test:fraud").up()
    with fraud.lease(1, exclusive=True):
        acting("ads", "ads")
        ads = ComputePool("shared", holder="test:ads")
        ads.lease(2, exclusive=True, is_async=True)
        assert {lease.team: lease.position for lease in ads.describe().leases} == {"fraud": None, "ads": 1}
        acting("fraud", "fraud")
    # The process of team fraud grants the lease of the other team.
    assert [(lease.team, lease.position) for lease in fraud.describe().leases] == [("ads", None)]
    acting("ads", "ads")
    ads = ComputePool("shared", holder="test:ads")
    assert len(ads.wait_for_nodes(2)) == 2
    ads.down()


def rows_of_fraud(store: Store) -> None:
    """One row of team fraud in each table."""
    ui_systems.write(
        store,
        *ui_systems.pool("ours", size=1),
        ui_systems.lease("ours", "airflow:a:dag/run", 1, team="fraud"),
        ui_systems.node("ours", 0),
        ui_systems.operation("ours", OperationKind.LEASE, OperationState.SUCCEEDED, 1, 60, 1),
        ui_systems.job("job", "ours", JobState.PENDING, 60, team="fraud"),
        JobMetrics(job_id="job", attempt=1, seq=0, generation=0, points="[]"),
        StudyLog(job_id="job", study=1, number=0, entry="{}"),
        StoredFile(path="jobs/job/1/model.ubj", content=b"1", written_at=0.0),
        StoredFile(path="jobs/model/job/model.pt", content=b"1", written_at=0.0),
        Promotion(
            registry_uri="x", model="m", alias="champion", version="1", metric="rmse", holdout_digest="", job_id="job",
            attempt=1, state=PromotionState.CONFIRMED, created_at=0.0,
        ),
    )  # fmt: skip
    with store.transaction() as session:
        session.execute(text("""UPDATE pools SET spec = '{"only_team": "fraud"}'"""))
        session.execute(
            text("INSERT INTO usage (pool, holder, nodes, begun_at, team) VALUES ('ours', 'h', 1, 0, 'fraud')")
        )


@contextmanager
def connected(store: Store) -> Iterator[Callable[[str], int]]:
    """A function that runs a statement, rolls it back, and returns how many rows it has changed or selected."""
    engine = create_engine(make_url(store.url))
    with engine.connect() as connection:

        def run(statement: str) -> int:
            try:
                return connection.execute(text(statement)).rowcount
            finally:
                connection.rollback()

        yield run
    engine.dispose()


def test_no_statement_of_another_team_changes_a_row(acting, on_postgresql):
    store = acting("reconciler", "*")
    rows_of_fraud(store)
    tables = {name: table for name, table in Base.metadata.tables.items() if name not in OPEN}
    assert set(policies._MAY_WRITE) == {*tables, *OPEN}
    for team, may in (("fraud", True), ("ads", False), ("Anna Müller", False), ("reconciler", True)):
        with connected(acting(team, "*")) as run:
            for name, table in tables.items():
                key = next(iter(table.primary_key)).name
                assert (run(f"UPDATE {name} SET {key} = {key}") > 0, run(f"DELETE FROM {name}") > 0) == (may, may), name
                assert (run(f"SELECT * FROM {name}") > 0) is (may or name != "files")
    with connected(acting("ads", "*")) as run:
        for name, table in tables.items():
            has_sequence = name in ("usage", "promotions")
            columns = ", ".join(column.name for column in table.columns if column.name != "id" or not has_sequence)
            copied = f"SELECT {columns} FROM {name}" if name != "files" else "VALUES ('jobs/job/1/model.ubj', 'x', 0)"
            with pytest.raises(ProgrammingError, match="row-level security"):
                run(f"INSERT INTO {name} ({columns}) {copied}")
        for statement in ("UPDATE history SET actor = 'x'", "DELETE FROM history", "DELETE FROM alembic_version"):
            with pytest.raises(ProgrammingError, match="permission denied"):
                run(statement)
        columns = ", ".join(column.name for column in tables["jobs"].columns if column.name not in ("pool", "team"))
        for pool, team, is_refused in (("free", "fraud", True), ("ours", "ads", True), ("free", "ads", False)):
            statement = f"INSERT INTO jobs ({columns}, pool, team) SELECT {columns}, '{pool}', '{team}' FROM jobs"
            with pytest.raises(ProgrammingError if is_refused else IntegrityError):  # the id is taken
                run(statement)
    on_postgresql.run("DELETE FROM pools", make_url(store.url).database)  # it has no nodes that could end


def test_only_the_owner_of_the_tables_upgrades_them(acting, later_schema):
    with pytest.raises(StoreError, match=r"must be owner .*run `shoal pool list` as the database user who owns them"):
        acting("ads", "ads")


@pytest.mark.parametrize("team", ["", "a'b", 'a"b', "a$do$", "x" * 45, "a\nb", "é" * 30])
def test_names_that_could_be_no_role_are_refused(team):
    with pytest.raises(InvalidArgumentError, match="cannot be the name of a role: use letters"):
        policies.policies([team])


def test_a_team_is_not_the_reconciler():
    with pytest.raises(InvalidArgumentError, match="choose another role for the reconciler"):
        policies.policies(["reconciler"])
