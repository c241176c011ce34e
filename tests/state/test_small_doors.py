"""The modes of folders under any umask, encodings of PostgreSQL, numbers without bound, and reserved ids of jobs."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import jobs
from shoal.errors import InvalidArgumentError, StoreError
from shoal.jobs import ids
from shoal.new_files import create_folder
from shoal.pool.backends.local.processes import spawn_detached
from shoal.state import Store
from shoal.state.home import home, subfolder
from shoal.state.private_folders import why_not_private, why_replaceable
from shoal.training import locations
from tests.support.waiting import wait_until


@pytest.fixture(params=[0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test under a umask."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_folders_of_the_home_are_private_under_any_umask(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "new" / "home"))
    log = home() / "pools" / "p" / "logs" / "node.log"
    spawn_detached(["/bin/true"], env={}, log=log)
    wait_until(log.exists, "the log")
    made = [home().parent, home(), subfolder("one", "two"), home() / "one", *list(log.parents)[:3]]
    assert {folder: why_not_private(folder) for folder in made} == dict.fromkeys(made)


def test_a_location_for_results_is_not_open_to_everybody(umask: int, tmp_path: Path):
    location = tmp_path / "shared" / "results"
    locations.try_out(str(location))
    assert why_replaceable(location) is None or not location.stat().st_mode & stat.S_IWOTH
    assert not location.parent.stat().st_mode & stat.S_IWOTH


def test_an_existing_folder_keeps_its_mode(tmp_path: Path):
    tmp_path.chmod(0o755)
    create_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_store_every_text_is_refused(postgres, encoding: str):
    name = f"shoal_{uuid.uuid4().hex[:8]}"
    postgres.run(f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        for migrate in (True, False):
            with pytest.raises(StoreError, match=f"encoding {encoding}.*createdb --encoding=UTF8"):
                Store(postgres.url(name), migrate=migrate).has_tables()
    finally:
        postgres.run(f"DROP DATABASE {name} WITH (FORCE)")


def test_texts_are_stored_whatever_the_encoding_of_the_client(on_postgresql, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with Store().transaction() as session:
        assert session.connection().exec_driver_sql("SELECT '€ 漢'::text").scalar() == "€ 漢"


@pytest.mark.parametrize("attempt", [10**29, 2**31, -(2**40)])
def test_a_number_that_no_database_can_hold_is_an_invalid_argument(either_store, attempt: int):
    Store()
    with pytest.raises(InvalidArgumentError, match="largest allowed number"):
        jobs.attach("job", attempt)


@pytest.mark.parametrize("name", ["model", "checkpoints", "staging"])
def test_names_of_folders_of_a_location_are_no_ids_of_jobs(name: str):
    with pytest.raises(InvalidArgumentError, match="choose another id"):
        ids.checked(name)
