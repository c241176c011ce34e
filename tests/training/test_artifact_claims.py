"""Folders that may be replaced, and those that may not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shoal.errors import InvalidArgumentError
from shoal.training.locations import MARKER, Claim

FIRST = Claim("job", "me", 1)
SECOND = Claim("job", "me", 2)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/model/job" if request.param == "local" else f"memory://{uuid4().hex}/model/job"


def write(path: str, content: bytes = b"theirs") -> None:
    import fsspec

    fs, root = fsspec.core.url_to_fs(path)
    fs.makedirs(root.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(root, content)


def names(folder: str) -> list[str]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(folder)
    return sorted(path.rpartition("/")[2] for path in fs.ls(root, detail=False))


def test_a_folder_of_this_job_is_made_anew(folder: str) -> None:
    assert FIRST.check(folder) is False
    FIRST.take(folder)
    write(f"{folder}/deep/weights")
    SECOND.take(folder)
    assert names(folder) == [MARKER]
    SECOND.remove(folder)
    assert FIRST.check(folder) is False


@pytest.mark.parametrize(
    "marker",
    [
        None,
        b"",
        b"[" * 20_000,
        b'{"job_id": "job"}',
        b'{"job_id": "job", "owner": "me", "attempt": Infinity}',
        json.dumps({"job_id": "other", "owner": "me", "attempt": 1}).encode(),
        json.dumps({"job_id": "job", "owner": "another store", "attempt": 1}).encode(),
    ],
)
def test_a_folder_of_others_is_left_alone(folder: str, marker: bytes | None) -> None:
    write(f"{folder}/weights")
    if marker is not None:
        write(f"{folder}/{MARKER}", marker)
    before = names(folder)
    for act in (FIRST.check, FIRST.take, FIRST.remove):
        with pytest.raises(InvalidArgumentError, match="move it away, or choose another artifact_location or job_id"):
            act(folder)
    assert names(folder) == before


def test_an_older_attempt_replaces_nothing_of_a_newer_one(folder: str) -> None:
    SECOND.take(folder)
    assert SECOND.has_marked(folder) and not FIRST.has_marked(folder)
    for act in (FIRST.check, FIRST.take, FIRST.remove):
        with pytest.raises(InvalidArgumentError, match=r"belongs to attempt 2 of job \"job\", so the older attempt 1"):
            act(folder)
    assert names(folder) == [MARKER]


class Killed(BaseException):
    """The process is gone at this point."""


def killed_at_weights(remove: Callable[..., None]) -> Callable[..., None]:
    def or_killed(*arguments: object) -> None:
        if str(arguments[-1]).endswith("weights"):
            raise Killed
        remove(*arguments)

    return or_killed


def test_what_a_killed_removal_has_left_is_removed_by_the_next(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FIRST.take(folder)
    write(f"{folder}/weights")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda path: (path / name for name in sorted(os.listdir(path))))
        patch.setattr(Path, "unlink", killed_at_weights(Path.unlink))
        patch.setattr(MemoryFileSystem, "rm_file", killed_at_weights(MemoryFileSystem.rm_file))
        with pytest.raises(Killed):
            FIRST.remove(folder)
    SECOND.remove(folder)
    assert FIRST.check(folder) is False


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "documents"
    FIRST.take(str(target))
    (tmp_path / "job").symlink_to(target)
    with pytest.raises(InvalidArgumentError, match="is a file or a link"):
        FIRST.remove(str(tmp_path / "job"))
    (target / "inner").symlink_to(tmp_path)
    FIRST.remove(str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_a_location_with_a_patterns_characters_means_itself() -> None:
    base = f"memory://{uuid4().hex}"
    theirs, mine = f"{base}/run1/model/job", f"{base}/run*/model/job"
    write(f"{theirs}/weights")
    FIRST.take(mine)
    write(f"{mine}/deep/weights[1]")

    SECOND.take(mine)

    assert names(theirs) == ["weights"]
    assert names(mine) == [MARKER]
    SECOND.remove(mine)
    assert not SECOND.check(mine)
    assert names(theirs) == ["weights"]
