"""Which pool is meant if none is named: rows of the store only."""

from __future__ import annotations

import pytest

from shoal.compat.snowflake import submit_directory
from shoal.distributors.pytorch import PyTorchDistributor, TorchDistributor
from shoal.errors import InvalidArgumentError, NoPoolError, PoolNotFoundError
from shoal.kinds.task_spec import spec_of
from shoal.os_processes import ProcessId, host_id, hostname
from shoal.pool import bound_host
from shoal.pool.api import ComputePool
from shoal.pool.options.base import is_pool_name
from shoal.pool.selection import defined_pool, which_pool
from shoal.pool.spec import PoolSpec, pool_name_of
from shoal.state import Store
from shoal.state.schema import Pool, PoolState
from shoal.training.run_config import RunConfig


@pytest.fixture
def add(fresh_home):
    def row(name, state=PoolState.UP, *, on=None, owner=None, **spec):
        bound_host.record(PoolSpec(name=name, **spec))
        with Store().transaction() as session:
            session.add(
                Pool(
                    name=name, spec=PoolSpec(name=name, **spec).model_dump(), state=state, host=on or hostname(),
                    min_nodes=1, host_id=on or host_id(), max_nodes=4, epoch=1, next_node=0,
                    created_at=0.0, touched_at=0.0,
                    owner=owner,
                )
            )  # fmt: skip

    return row


def test_a_pool_that_is_up_comes_before_pools_that_are_not(add):
    add("old", PoolState.DOWN)
    add("ending", PoolState.STOPPING)
    add("retrain")
    assert which_pool(Store()) == which_pool(Store(), only_up=True) == "retrain"
    assert which_pool(Store(), "old", only_up=True) == "old"  # the caller's own choice


def test_the_only_pool_is_meant_while_it_is_down(add):
    add("retrain", PoolState.DOWN)
    assert which_pool(Store()) == "retrain"
    with pytest.raises(NoPoolError, match=r"none is up on this host \(the store contains retrain\): start one with"):
        which_pool(Store(), only_up=True)


def test_a_choice_is_asked_for_where_several_are_up_or_none_of_several(add):
    add("a", PoolState.DOWN)
    add("b", PoolState.DOWN)
    with pytest.raises(NoPoolError, match=r"none is up on this host \(the store contains a, b\)"):
        which_pool(Store())
    add("d")
    add("c")
    with pytest.raises(NoPoolError, match=r"no pool was named, and several are up \(c, d\): name one with pool_name="):
        which_pool(Store())


def test_pools_of_other_hosts_and_processes_do_not_count_as_up(add):
    add("theirs", on="another-host")
    add("embedded", owner=ProcessId.mine().to_json())
    assert which_pool(Store()) == "theirs"  # its state can be read here
    with pytest.raises(NoPoolError, match="theirs"):
        which_pool(Store(), only_up=True)
    add("ours")
    assert which_pool(Store()) == "ours"


def test_the_variable_names_the_pool(add, monkeypatch):
    add("a")
    add("b", PoolState.DOWN)
    monkeypatch.setenv("SHOAL_POOL", "b")
    assert which_pool(Store(), only_up=True) == "b"
    monkeypatch.setenv("SHOAL_POOL", "c")
    with pytest.raises(PoolNotFoundError, match="existing pools: a, b"):
        which_pool(Store())


def test_a_uri_names_its_pool_and_says_its_settings(add, monkeypatch):
    add("a")
    assert defined_pool("a") is defined_pool() is None
    spec = defined_pool("local://a?max_nodes=3")
    assert (spec.name, spec.max_nodes) == ("a", 3) and which_pool(Store(), "local://a?max_nodes=3") == "a"
    monkeypatch.setenv("SHOAL_POOL", "local://b")
    assert defined_pool().name == "b" and defined_pool("a") is None
    with pytest.raises(PoolNotFoundError, match=r"b.*existing pools: a"):
        which_pool(Store())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("retrain-2", "retrain-2"),
        ('"MY_NOTEBOOK"', "my-notebook"),
        ('MY_DB."My Schema".NB', "my-db-my-schema-nb"),
        ("  _x_  ", "x"),
        ("a--b", "a--b"),
        ("x" * 41, "x" * 31 + "-3164596d"),
        ('""', "12ae32cb"),
        ("笔记本", "155c2f5d"),
        ("\ud800", "91a681b9"),
    ],
)
def test_any_text_makes_a_pool_name(text, name):
    assert pool_name_of(text) == name
    assert is_pool_name(name)


def test_an_object_that_is_no_pool_selects_none(add):
    add("retrain")
    with pytest.raises(InvalidArgumentError, match="a pool cannot be given by an object of type dict"):
        ComputePool({"name": "other"})


def test_a_script_whose_folder_cannot_travel_to_other_machines_is_refused_before_anything_starts(
    add, tmp_path, monkeypatch
):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    (tmp_path / "rows.csv").write_text("1,2")
    monkeypatch.setattr("shoal.training.pytorch.program.MAX_FILES", 1)
    add("lab", backend="ray", address="http://10.0.0.5:8265")
    calls = (
        lambda: PyTorchDistributor(script, run_config=RunConfig(pool_name="lab")).submit(),
        lambda: TorchDistributor(use_gpu=False).submit(script),
        lambda: submit_directory(tmp_path, "LAB", entrypoint="train.py"),
        lambda: submit_directory(tmp_path, "ray://lab?address=http://10.0.0.5:8265", entrypoint="train.py"),
        lambda: spec_of({"run_config": {"pool_name": "lab"}}, train_func=script),
    )
    refused = r'at least 2 files of .* pool "lab" may be on other machines: .*\.shoalignore'
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=refused):
            call()
    add("here")
    add("nfs", backend="ray", address="http://10.0.0.5:8265", shared_folders=str(tmp_path))
    for pool in ("here", "nfs"):
        assert spec_of({"run_config": {"pool_name": pool}}, train_func=script).program
    (tmp_path / ".shoalignore").write_text("*.csv")
    assert spec_of({"run_config": {"pool_name": "lab"}}, train_func=script).program
