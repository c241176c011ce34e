"""Two teams with a store each: no row and no statement of one reaches the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from shoal import jobs
from shoal.errors import JobNotFoundError, PoolElsewhereError, PoolNotFoundError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.models.ledger import confirmed_promotions
from shoal.os_processes import host_id, hostname
from shoal.pool import reconciling
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.home import home, store_tag, use_store
from shoal.state.schema import Base, Job, JobState, Node, NodeState, Pool, PoolState, Promotion, PromotionState
from tests.support import ui_systems
from tests.support.team_stores import team_stores


@pytest.fixture
def urls(postgres, fresh_home) -> Iterator[dict[str, str]]:
    with team_stores(postgres) as urls:
        yield urls


@pytest.fixture
def acting(urls, monkeypatch):
    """Make this process one of a team, with the team's home: its users have one each."""

    def act(team: str) -> Store:
        monkeypatch.setenv("SHOAL_STATE_URL", urls[team])
        monkeypatch.setenv("SHOAL_HOME", f"{os.environ['SHOAL_HOME'].removesuffix('-ads')}{'-ads' * (team == 'ads')}")
        return Store()

    return act


def planted(stolen: Path) -> list[object]:
    """The rows with which a team that shares the store could act as the user of another team's processes."""
    ray = PoolSpec.parse(f"ray://stolen?address=http://127.0.0.1:9&token_file={stolen}")
    python = PoolSpec.parse("local://python").model_copy(update={"python": "/bin/false"})
    rows: list[object] = [
        Pool(
            name=spec.name, spec=spec.model_dump(mode="json"), state=PoolState.UP, host=host and hostname(),
            host_id=host, min_nodes=1, max_nodes=4, epoch=1, next_node=1, created_at=0.0, touched_at=0.0,
        )
        for spec, host in ((ray, ""), (python, host_id()))
    ]  # fmt: skip
    node = ui_systems.node("stolen", 0, state=NodeState.READY)
    moved = ui_systems.job("moved", "python", JobState.PENDING, 60)
    second = ui_systems.job("victims", "python", JobState.PENDING, 60)
    second.attempt = 2
    outside = ui_systems.job("../../outside", "python", JobState.FAILED, 60)
    promotion = Promotion(
        registry_uri="x", model="m", alias="champion", version="9", metric="rmse", holdout_digest="", job_id="victims",
        attempt=2, state=PromotionState.CONFIRMED, created_at=0.0,
    )  # fmt: skip
    return [*rows, node, moved, second, outside, promotion]


def test_the_rows_that_one_team_plants_in_its_store_do_not_reach_the_other(acting, urls, monkeypatch):
    monkeypatch.setattr(reconciling, "spawn_detached", lambda *_, **__: None)
    fraud = acting("fraud")
    ui_systems.write(fraud, *ui_systems.pool("ours"), ui_systems.job("victims", "ours", JobState.RUNNING, 60))
    secret = home() / "token"
    secret.write_text("a token")
    outside = home().parent / "outside"

    ads = acting("ads")
    ui_systems.write(ads, *planted(secret))
    assert {pool.name for pool in list_pools()} == {"stolen", "python"}

    acting("fraud")
    assert [pool.name for pool in list_pools()] == ["ours"]
    assert [(job.job_id, job.attempt) for job in jobs.list_jobs()] == [("victims", 1)]
    assert confirmed_promotions(fraud) == []
    assert jobs.sweep() == []
    for name in ("stolen", "python"):
        with pytest.raises(PoolNotFoundError):
            ComputePool(name).describe()
    with pytest.raises(JobNotFoundError):
        jobs.attach("moved")
    assert attempts.latest(fraud, "victims").attempt == 1
    assert (secret.read_text(), outside.exists()) == ("a token", False)


@pytest.mark.parametrize(("attacker", "victim"), [("ads", "fraud"), ("fraud", "ads")])
def test_no_statement_reaches_the_store_of_another_team(acting, urls, attacker, victim):
    """Also not with the victim's database or schema in the attacker's URL."""
    acting(victim)
    user = make_url(urls[attacker])
    engine = create_engine(make_url(urls[victim]).set(username=user.username, password=user.password))
    schema = "public" if victim == "fraud" else victim
    try:
        for name, table in Base.metadata.tables.items():
            key = next(iter(table.primary_key)).name
            for statement in (
                f"SELECT * FROM {schema}.{name}",
                f"INSERT INTO {schema}.{name} SELECT * FROM {schema}.{name}",
                f"UPDATE {schema}.{name} SET {key} = {key}",
                f"DELETE FROM {schema}.{name}",
                f"CREATE TABLE {schema}.planted (id int)",
            ):
                with pytest.raises(SQLAlchemyError, match="permission denied"), engine.begin() as connection:
                    connection.execute(text(statement))
    finally:
        engine.dispose()


def test_a_schema_is_a_store_of_its_own(acting, urls, postgres, monkeypatch):
    acting("fraud")
    ads = acting("ads")
    ui_systems.write(ads, *ui_systems.pool("theirs"))
    found = "SELECT schemaname FROM pg_tables WHERE tablename IN ('pools', 'alembic_version')"
    assert postgres.run(found, "shoal") == [("ads",), ("ads",)]
    of_ads = store_tag()
    monkeypatch.setenv("SHOAL_STATE_URL", urls["ads"].partition("?")[0])
    assert "" != store_tag() != of_ads


def test_a_server_follows_no_row_of_another_store_to_a_file_a_program_or_a_head(acting, urls, fresh_home, monkeypatch):
    """A process that only shows the store of a team, or ends jobs in it, is none of its hosts."""
    spawned: list[object] = []
    monkeypatch.setattr(reconciling, "spawn_detached", lambda *a, **_: spawned.append(a))
    store = acting("ads")
    secret = fresh_home / "token"
    secret.write_text("a token")
    ui_systems.write(store, *planted(secret))
    monkeypatch.delenv("SHOAL_STATE_URL")
    kept = fresh_home / "jobs" / "moved"
    kept.mkdir(parents=True)

    def serve() -> None:
        use_store(urls["ads"])
        assert home().parent == Path(os.environ["SHOAL_HOME"])
        for status in list_pools():
            assert not status.is_here
            with pytest.raises(PoolElsewhereError):
                ComputePool(status.name).endpoint()
        assert jobs.attach("moved").cancel()
        with pytest.raises(PoolElsewhereError, match="use it on a host of this team"):
            ComputePool("python").alter(max_nodes=3)

    copy_context().run(serve)
    assert attempts.load(store, Key("moved", 1)).state is JobState.CANCELLED
    assert kept.exists()
    assert spawned == []
    with store.reading() as session:
        assert session.query(Node).count() == 1 and session.query(Job).count() == 3
