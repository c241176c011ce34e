"""Functions and scripts in a real gang on two real Ray nodes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import RunConfig
from shoal.data import DataConnector, RayDataIngester, ShardedDataConnector
from shoal.distributors.pytorch import (
    PyTorchDistributor,
    PyTorchScalingConfig,
    Response,
    TorchDistributor,
    WorkerResourceConfig,
    get_context,
    run_local,
)
from shoal.errors import CapacityError, DataError, InvalidArgumentError, TrainingError, WorkerLostError
from shoal.training import run_config
from shoal.training.gang import connection
from shoal.training.gang.gang import Gang
from shoal.training.locations import MARKER
from shoal.training.pytorch import engine
from tests.support.two_node_cluster import ROWS, TwoNodes, assert_ended
from tests.training.pytorch import functions

pytestmark = pytest.mark.ray

TWO = PyTorchScalingConfig(num_nodes=2)
THREE = PyTorchScalingConfig(num_workers_per_node=3, resource_requirements_per_worker=WorkerResourceConfig(num_cpus=0))
SCRIPT = Path(__file__).with_name("script.py")


def distributor(
    function: Any, tmp_path: Path, scaling: PyTorchScalingConfig = TWO, **config: Any
) -> PyTorchDistributor:
    return PyTorchDistributor(function, scaling, RunConfig(artifact_location=str(tmp_path), **config))


def left_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_rank_knows_its_place_and_what_was_handed_to_it(
    driver: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = distributor(functions.where, tmp_path, job_id="place").run(
        str(tmp_path / "at-exit"), hyper_params={"lr": 0.1, "layers": [1, 2]}
    )
    first, second = run.get_results()
    assert [place["RANK"] for place in (first, second)] == ["0", "1"]
    assert [place["GROUP_RANK"] for place in (first, second)] == ["0", "1"]
    for place in (first, second):
        assert (place["WORLD_SIZE"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) == ("2", "0", "1")
        assert place["MASTER_ADDR"] == "127.0.0.1"
        assert place["MASTER_PORT"] == first["MASTER_PORT"] != "0"
        asked = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        assert [str(value) for value in place["asked"]] == [place[name] for name in asked]
        assert place["other names"] == [place["asked"][0], *place["asked"][:5]]
        assert place["hyper"] == {"lr": 0.1, "layers": [1, 2]}
        assert place["threads"] == 1
        assert place["argv"] == ["where"]
    assert run.get_metrics() == {"loss": 0.5}
    assert run.get_model_dir() == f"{tmp_path}/model/place"
    published = [MARKER, "open.txt", *(f"rank-{rank}/mine.txt" for rank in (0, 1)), "same.txt"]
    assert left_in(tmp_path) == ["at-exit-0", "at-exit-1", *(f"model/place/{name}" for name in published)]
    assert Path(run.get_model_dir(), "open.txt").read_text() == "left open"
    assert [(tmp_path / f"at-exit-{rank}").read_text() for rank in (0, 1)] == ["at exit"] * 2
    printed = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        assert f"[rank {rank}] hello from {rank}" in printed
        assert f"[rank {rank}] and without an end" in printed
    assert_ended([int(Path(run.get_model_dir(), f"rank-{rank}", "mine.txt").read_text()) for rank in (0, 1)])


def test_a_sharded_connector_gives_each_rank_its_part_and_a_plain_one_all(
    driver: TwoNodes, tmp_path: Path, rows: Path
) -> None:
    datasets = {"sharded": ShardedDataConnector.from_parquet(rows), "whole": DataConnector.from_parquet(rows)}
    (first, all_of_first), (second, all_of_second) = (
        distributor(functions.rows_seen, tmp_path).run(dataset_map=datasets).get_results()
    )
    assert all_of_first == all_of_second == ROWS
    assert abs(len(first) - len(second)) <= 1_000
    assert sorted(first + second) == sorted(datasets["whole"].to_pandas()["a"].tolist())


@pytest.mark.long
def test_ray_data_reads_two_datasets_beside_workers_that_ask_for_all_cpus(
    driver: TwoNodes, tmp_path: Path, rows: Path
) -> None:
    one, other = (ShardedDataConnector.from_parquet(rows, ingestor_class=RayDataIngester) for _ in range(2))
    run = distributor(functions.rows_in_pairs, tmp_path).run(dataset_map={"one": one, "other": other})
    assert sum(sum(pairs) for pairs in run.get_results()) == 2 * ROWS


def as_good_as_alone(run: Response, steps: int, batch: int) -> None:
    """Compare a run of `functions.train` with one process that has the same global batch."""

    def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = functions.train(steps, batch)
        folder = Path(get_context().get_model_dir())
        model = torch.load(folder / "model.pt")
        shutil.rmtree(folder)
        return losses, model

    losses, weights = run_local(alone)
    for result in run.get_results():
        assert result == run.get_results()[0]
    # Sums in another order, in float32.
    np.testing.assert_allclose(run.get_results()[0], losses, rtol=1e-4)
    assert losses[-1] < 0.5 * losses[0]
    for name, values in torch.load(Path(run.get_model_dir(), "model.pt")).items():
        torch.testing.assert_close(values, weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_ddp_of_three_is_as_good_as_one_process(driver: TwoNodes, tmp_path: Path) -> None:
    as_good_as_alone(distributor(functions.train, tmp_path, THREE).run(12, 48), 12, 48)


def test_a_torchrun_script_runs_unchanged(driver: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distributor(SCRIPT, tmp_path).run("--epochs", 2, "--out", tmp_path / "trained.pt")
    printed = capsys.readouterr().out
    assert "[rank 0] world 2, epoch 1" in printed
    assert torch.load(tmp_path / "trained.pt")["weight"].shape == (1, 4)
    fails = tmp_path / "fails.py"
    fails.write_text("raise SystemExit(2)")
    with pytest.raises(TrainingError, match=r"fails.py exited with 2"):
        distributor(fails, tmp_path, PyTorchScalingConfig(num_nodes=1)).run()


@pytest.mark.long
def test_fsdp2_trains_on_cpus_and_gives_its_whole_state(driver: TwoNodes, tmp_path: Path) -> None:
    first, second = distributor(functions.shard_fully, tmp_path).run().get_results()
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < 0.5 * first["losses"][0]
    assert first["local"] + second["local"] == 4 * 16 + 16 + 16 + 1
    assert first["whole"] == {"0.weight": (16, 4), "0.bias": (16,), "2.weight": (1, 16), "2.bias": (1,)}


@pytest.fixture(scope="module")
def undisturbed_run(driver: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Response:
    """Ten steps on two nodes."""
    return distributor(functions.train, tmp_path_factory.mktemp("whole")).run(10, 64)


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Response) -> list[float]:
    """Its losses."""
    losses: list[float] = undisturbed_run.get_results()[0]
    return losses


def test_ddp_is_as_good_as_one_process_with_the_same_global_batch(undisturbed_run: Response) -> None:
    as_good_as_alone(undisturbed_run, 10, 64)


@pytest.mark.parametrize("deed", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_a_lost_worker_is_replaced_and_the_loss_goes_on(
    driver: TwoNodes,
    undisturbed: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    deed: str,
) -> None:
    if deed == "stop":  # elsewhere a worker may be silent for longer, while it imports on a busy machine
        monkeypatch.setattr(connection, "WORKER_SILENCE_S", 4.0)
    run = distributor(functions.train, tmp_path, max_restarts=1).run(10, 64, deed=deed, at=6, folder=str(tmp_path))
    assert run.result.restarts == 1
    assert run.get_results() == [undisturbed, undisturbed]
    assert "continuing from checkpoint 6 (restart 1 of 1)" in capsys.readouterr().out
    assert_ended([int((tmp_path / "done").read_text())])
    assert not (tmp_path / "checkpoints").exists() or not left_in(tmp_path / "checkpoints")


@pytest.fixture
def gangs(monkeypatch: pytest.MonkeyPatch) -> list[Gang]:
    """Those that the test starts."""
    started: list[Gang] = []
    start = Gang.start

    def noted(*args: Any, **kwargs: Any) -> Gang:
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(Gang, "start", noted)
    return started


def assert_nothing_left(driver: TwoNodes, gangs: list[Gang], tmp_path: Path) -> None:
    assert len(gangs) == 2
    assert_ended([worker.pid for gang in gangs for worker in gang.workers])
    assert left_in(tmp_path) == ["done", f"model/node/{MARKER}", "model/node/model.pt"]
    assert not list(driver.folder.glob("shoal-*"))


def test_after_the_loss_of_a_node_the_loss_goes_on_on_what_is_left(
    driver: TwoNodes,
    undisturbed: list[float],
    gangs: list[Gang],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_config, "REPLACE_NODE_S", 1.0)
    training = distributor(functions.train, tmp_path, max_restarts=1, min_workers=1, job_id="node")
    try:
        run = training.run(10, 64, deed="kill the node", at=6, folder=str(tmp_path))
    finally:
        driver.replace_second()
    assert (run.result.num_workers, run.result.restarts) == (1, 1)
    [losses] = run.get_results()
    # To the last bit until then; after it, sums in another order.
    assert losses[:6] == undisturbed[:6]
    np.testing.assert_allclose(losses, undisturbed, rtol=1e-4)
    assert run.get_metrics() == {"loss": losses[-1]}
    printed = capsys.readouterr().out
    assert "rank 1 (node b, pid" in printed and "continuing from checkpoint 6 (restart 1 of 1)" in printed
    assert "continuing with 1 workers" in printed
    assert_nothing_left(driver, gangs, tmp_path)


@pytest.mark.long
def test_a_lost_node_is_waited_for(
    driver: TwoNodes, undisturbed: list[float], gangs: list[Gang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, attempts = engine.Run._attempt, []

    def attempted(run: Any) -> Any:
        attempts.append(run)
        if len(attempts) == 3:  # the second found no room; in this thread, because Ray's nodes end with theirs
            driver.replace_second()
        return attempt(run)

    monkeypatch.setattr(engine.Run, "_attempt", attempted)
    training = distributor(functions.train, tmp_path, max_restarts=1, job_id="node")
    run = training.run(10, 64, deed="kill the node", at=6, folder=str(tmp_path))
    assert (run.result.num_workers, run.result.restarts, len(attempts)) == (2, 1, 3)
    assert run.get_results() == [undisturbed, undisturbed]
    assert_nothing_left(driver, gangs, tmp_path)


@pytest.mark.long
def test_a_worker_that_is_lost_too_often_ends_the_run(driver: TwoNodes, tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=r"rank 1 \(node b, pid \d+\) was lost"):
        distributor(functions.train, tmp_path, job_id="lost").run(10, 64, deed="kill", at=2, folder=str(tmp_path))
    assert left_in(tmp_path) == ["done"]


def test_the_first_to_raise_is_the_cause_though_all_fail(driver: TwoNodes, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"rank 1 \(node b, pid \d+\) failed: ZeroDivisionError: on purpose"
    ) as info:
        distributor(functions.train, tmp_path).run(10, 64, deed="raise", at=2, folder=str(tmp_path))
    assert "in _do" in info.value.__notes__[0]
    assert_ended([int((tmp_path / "done").read_text())])


def test_a_run_ends_at_its_time_limit(driver: TwoNodes, gangs: list[Gang], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="time limit"):
        distributor(functions.hang, tmp_path, PyTorchScalingConfig(), timeout=5).run(str(tmp_path))
    [gang] = gangs  # whether its worker has come to the function by then or not
    assert_ended([worker.pid for worker in gang.workers])


@pytest.mark.long
def test_workers_may_share_a_node_and_claim_nothing(driver: TwoNodes, tmp_path: Path) -> None:
    places = distributor(functions.where, tmp_path, THREE).run().get_results()
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "2"]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"3"}
    assert {place["GROUP_RANK"] for place in places} == {"0"}


def test_what_cannot_work_is_refused_before_anything_starts(
    driver: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gang, "start", lambda *_, **__: pytest.fail("a gang was started"))
    with pytest.raises(CapacityError, match=r"num_nodes=3 .* there is room for only 2 .* shoal.scale_cluster"):
        distributor(functions.where, tmp_path, PyTorchScalingConfig(num_nodes=3)).run()
    with pytest.raises(InvalidArgumentError, match="missing a required argument: 'batch'"):
        distributor(functions.train, tmp_path).run(3)
    with pytest.raises(DataError, match='dataset "gone": '):
        distributor(functions.where, tmp_path).run(dataset_map={"gone": DataConnector.from_parquet(tmp_path / "no")})
    with pytest.raises(InvalidArgumentError, match='artifact_location "/etc/passwd" cannot be written to'):
        distributor(functions.where, tmp_path).run(artifact_location="/etc/passwd")
    for kind in ("model", "checkpoints"):
        theirs = tmp_path / kind / "theirs" / "file"
        theirs.parent.mkdir(parents=True)
        theirs.touch()
        with pytest.raises(InvalidArgumentError, match=rf"{kind}/theirs is not empty, and job"):
            distributor(functions.where, tmp_path, job_id="theirs").run()
        assert theirs.exists()
        theirs.unlink()


def test_a_value_that_cannot_be_sent_loses_neither_the_model_nor_the_metrics(driver: TwoNodes, tmp_path: Path) -> None:
    response = distributor(functions.unpicklable, tmp_path).run()
    assert Path(response.get_model_dir(), "weights").read_text() == "trained"
    assert response.get_metrics() == {"loss": 0.5}
    with pytest.raises(TrainingError, match=r"return value of rank 0 is lost: a generator cannot be pickled"):
        response.get_results()


def test_an_exception_without_a_text_is_the_cause(driver: TwoNodes, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"failed: .*TextlessError: <exception str\(\) failed>"):
        distributor(functions.fail_without_text, tmp_path).run()


def test_an_error_of_spawn_says_what_to_do(driver: TwoNodes, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"failed: .*PicklingError: .* on __main__ failed") as info:
        distributor(functions.spawn_a_function_of_the_script, tmp_path).run()
    assert all("move it into a module, or use DataLoader(" in note for note in info.value.__notes__)


def test_torch_distributor_returns_the_first_ones_value(driver: TwoNodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert TorchDistributor(2, local_mode=False, use_gpu=False).run(functions.sum_of_ranks, 10) == 11.0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Started distributed training with 2 executor processes"
    assert printed[-1] == "Finished distributed training with 2 executor processes"
    assert TorchDistributor(3, use_gpu=False).run(functions.sum_of_ranks, 0) == 3.0
    assert "Finished local training with 3 processes" in capsys.readouterr().out
    with pytest.raises(CapacityError, match="num_processes=2 of 0 CPUs and 1 GPU for each worker"):
        TorchDistributor(2).run(functions.sum_of_ranks, 0)
    assert "Started" not in capsys.readouterr().out


def test_torch_distributor_says_how_many_processes_the_gpus_suffice_for_before_it_starts_them(
    driver: TwoNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message))
    node = driver.cluster.add_node(
        num_cpus=1, num_gpus=5, node_name="gpus", node_ip_address="127.0.0.1", object_store_memory=80 * 2**20
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            seen = TorchDistributor(4, gpus_per_process=2).run(functions.gpus)
    finally:
        driver.cluster.remove_node(node)
    # Ray decides which of the two workers has which pair.
    assert seen in [{"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1,2,3", "2,3,0,1")]
    printed = capsys.readouterr().out.splitlines()
    assert "num_processes=4 of 0 CPUs and 2 GPUs for each worker does not fit: there is room for only 2 " in printed[0]
    assert printed[1] == "Started local training with 2 processes"
    assert printed[-1] == "Finished local training with 2 processes"
