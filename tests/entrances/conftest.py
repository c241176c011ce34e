"""What every entrance has to hold: only shoal's own errors, nothing left, no secret in a message."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from shoal.errors import ShoalError
from shoal.state import Store
from shoal.state.schema import Base
from tests.entrances.wrong_values import SECRET
from tests.support.pool_processes import processes_of_home


@contextmanager
def refusals(*others: type[Exception]) -> Iterator[None]:
    """An error that is raised inside is shoal's own, or of the given kinds, and repeats no secret."""
    refused: Exception | None = None
    try:
        yield
    except (ShoalError, *others) as error:
        refused = error
    if refused is not None:
        assert str(refused).strip(), f"{type(refused).__name__} says nothing"
        assert SECRET not in "".join(traceback.format_exception(refused))


@pytest.fixture
def nothing_left(fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A home and a working folder; a function that fails where an example left a file. No row or process is left."""
    monkeypatch.chdir(tmp_path)
    (fresh_home / "staging").mkdir(mode=0o700)  # stays once it is there; what is staged in it must not
    store = Store()
    with store.reading() as session:
        session.execute(select(1))
    before = _files(fresh_home, tmp_path)

    def check() -> None:
        assert _files(fresh_home, tmp_path) == before

    yield check
    check()
    assert processes_of_home() == []
    with store.reading() as session:
        tables = Base.metadata.sorted_tables
        rows = {table.name: session.scalar(select(func.count()).select_from(table)) for table in tables}
    assert set(rows.values()) == {0}, rows


def _files(*folders: Path) -> set[str]:
    """All files and folders but the database's own and locks."""
    return {
        os.path.join(folder, name)
        for root in folders
        for folder, subfolders, files in os.walk(root)
        for name in (*subfolders, *files)
        if not name.startswith("state.db") and not name.endswith(".lock")
    }
