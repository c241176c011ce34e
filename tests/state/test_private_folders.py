"""The runtime roots, and what is deleted in them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import StoreError
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.reconciling import sweep
from shoal.state import Store
from shoal.state.home import home, lock_file
from shoal.state.private_folders import ROOT_VARIABLE, node_ids, runtime_root, turn_lock

NODE = "0123456789"


def documents(folder: Path) -> Path:
    """Something that must not be deleted."""
    (folder / "Documents" / NODE).mkdir(parents=True)
    (folder / "Documents" / NODE / "letter").write_text("dear")
    return folder / "Documents"


def intact(folder: Path) -> bool:
    return (folder / NODE / "letter").read_text() == "dear"


def test_the_root_is_private_and_stays(fresh_home, temp):
    root = runtime_root()
    assert root.parent == temp
    assert root.stat().st_mode & 0o777 == 0o700
    assert runtime_root() == root


def test_two_homes_never_share_a_root(fresh_home, temp, monkeypatch, tmp_path):
    roots = set()
    for name in ("a", "b"):
        monkeypatch.setenv("SHOAL_HOME", str(tmp_path / name))
        roots.add(runtime_root())
    assert len(roots) == 2
    longest = runtime_root() / NODE / "session_2026-11-21_07-26-59_012376_4194304" / "sockets" / "dash_MetricsHead"
    assert len(os.fsencode(longest)) == 107  # AF_UNIX


@pytest.mark.processes
def test_processes_that_ask_at_once_get_the_same_root(fresh_home, temp):
    ask = "from shoal.state.private_folders import runtime_root; print(runtime_root())"
    askers = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {asker.communicate()[0].strip() for asker in askers}
    assert said == {str(runtime_root())}
    assert [entry.name for entry in temp.iterdir()] == [runtime_root().name]


def turned_into_a_symlink(root: Path) -> None:
    root.rename(root.with_name("moved"))
    root.symlink_to("moved")


def given_to_another_user(root: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.lchown(root, 65534, 65534)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (turned_into_a_symlink, "is a symlink"),
        (given_to_another_user, "belongs to user 65534"),
        (lambda root: root.chmod(0o755), "other users can enter it"),
        (lambda root: root.chmod(0o777), "other users can write to it"),
        (lambda root: (shutil.rmtree(root), root.touch()), "is not a folder"),
        (lambda root: (root / "shoal.json").unlink(), "lacks the marker file"),
    ],
    ids=["symlink", "foreign", "readable", "writable", "file", "unmarked"],
)
def test_a_root_that_others_may_have_had_a_hand_in_is_left_and_made_anew(fresh_home, temp, spoil, why, caplog):
    root = runtime_root()
    spoil(root)
    before = root.lstat()
    with caplog.at_level(logging.WARNING):
        anew = runtime_root()
    assert anew != root
    assert anew.stat().st_mode & 0o777 == 0o700
    assert why in caplog.text
    assert str(root) in caplog.text
    assert root.lstat() == before
    assert runtime_root() == anew


def test_a_root_that_is_gone_is_made_anew(fresh_home, temp):
    root = runtime_root()
    shutil.rmtree(root)
    assert runtime_root() != root
    assert runtime_root().exists()


def test_nodes_in_an_earlier_root_are_still_found(fresh_home, temp):
    root = runtime_root()
    (root / NODE).mkdir()
    (root / "shoal.json").rename(root / "away")
    anew = runtime_root()
    (root / "away").rename(root / "shoal.json")
    assert node_ids() == [NODE]
    assert sweep(Store()) == [f"left-over node {NODE}: ended"]
    assert not root.exists()  # nothing is in it, and new nodes go elsewhere
    assert runtime_root() == anew


def test_another_temp_folder_has_a_root_of_its_own_and_a_sweep_finds_both(fresh_home, temp, monkeypatch):
    (runtime_root() / NODE).mkdir()
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert runtime_root().parent == Path("/tmp")
    assert sweep(Store()) == [f"left-over node {NODE}: ended"]


def test_the_root_of_another_home_is_not_taken_from_the_environment(fresh_home, temp, monkeypatch, tmp_path):
    """A shell within a node of another home sweeps this home: the other's nodes are no leftovers."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "other"))
    other = runtime_root()
    (other / NODE).mkdir()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(ROOT_VARIABLE, str(other))
    assert sweep(Store()) == []
    assert (other / NODE).exists()
    assert runtime_root() != other


def test_a_temp_folder_in_which_others_can_replace_things_is_refused(fresh_home, temp):
    temp.chmod(0o777)
    with pytest.raises(StoreError, match=r"has mode 0777: other users can replace .* Set TMPDIR"):
        runtime_root()
    assert list(temp.iterdir()) == []


def test_a_temp_folder_below_one_of_another_user_is_refused(fresh_home, temp, monkeypatch):
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    (temp / "a" / "b").mkdir(parents=True, mode=0o700)
    os.chown(temp / "a", 65534, 65534)
    monkeypatch.setattr("tempfile.tempdir", str(temp / "a" / "b"))
    with pytest.raises(StoreError, match=rf"lies in {temp}/a, which belongs to user 65534"):
        runtime_root()


def test_a_temp_folder_whose_path_is_too_long_for_sockets_is_refused(fresh_home, temp, monkeypatch):
    (temp / "x").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(temp / "x"))
    with pytest.raises(StoreError, match=r"109 bytes, 107 are allowed. Set TMPDIR"):
        ComputePool("local://long").up()
    assert list_pools() == []
    assert list((temp / "x").iterdir()) == []


def test_a_sweep_removes_nothing_but_folders_of_nodes(fresh_home, temp, caplog):
    kept = documents(temp)
    root = runtime_root()
    (root / NODE).symlink_to(kept)
    (root / "abcdef0123").mkdir()
    (root / "notes").mkdir()
    (root / "fedcba9876").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert sweep(Store()) == ["left-over node abcdef0123: ended"]
    assert intact(kept)
    assert sorted(entry.name for entry in root.iterdir()) == sorted([NODE, "fedcba9876", "notes", "shoal.json"])
    for left in (NODE, "fedcba9876", "notes"):
        assert f"{root / left} is not a node's folder" in caplog.text


def test_turns_are_taken_in_a_folder_of_the_users_own(fresh_home, temp):
    assert turn_lock(0) == temp / f"shoal-turns-{os.geteuid()}" / "start0.lock"
    assert turn_lock(0).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "squat",
    [lambda path: path.symlink_to("/"), lambda path: path.touch(), lambda path: (path.mkdir(), path.chmod(0o777))],
    ids=["symlink", "file", "writable"],
)
def test_turns_are_taken_in_the_home_where_the_folder_is_not_safe(fresh_home, temp, squat):
    squat(temp / f"shoal-turns-{os.geteuid()}")
    assert turn_lock(0) == lock_file("start0")


def test_a_home_that_others_can_read_is_closed(fresh_home, caplog):
    fresh_home.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        Store()
    assert fresh_home.stat().st_mode & 0o777 == 0o700
    assert "had mode 0755" in caplog.text


def test_a_home_that_others_can_write_to_is_refused(empty_home):
    empty_home.chmod(0o777)
    with pytest.raises(StoreError, match=r"SHOAL_HOME .* has mode 0777: .* `chmod 700 "):
        Store()
    assert list(empty_home.iterdir()) == []


def test_a_home_of_another_user_is_refused(fresh_home):
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(fresh_home, 65534, 65534)
    with pytest.raises(StoreError, match=r"SHOAL_HOME .* belongs to user 65534"):
        Store()


def test_the_record_names_every_root_that_may_have_nodes(fresh_home, temp):
    first = runtime_root()
    first.chmod(0o755)
    second = runtime_root()
    (record,) = home().glob("runtime-*.json")
    assert json.loads(record.read_text()) == [str(first), str(second)]
