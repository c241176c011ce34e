"""What a function's run is made of, without a gang."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from shoal.data import DataConnector
from shoal.distributors.pytorch import (
    PyTorchDistributor,
    PyTorchScalingConfig,
    TorchDistributor,
    WorkerResourceConfig,
    get_context,
    run_local,
)
from shoal.errors import CapacityError, InvalidArgumentError, TrainingError, UnusableGpuError
from shoal.training.cluster import Node
from shoal.training.gang.placement import GangShape
from shoal.training.locations import MARKER, Claim
from shoal.training.pytorch import checkpoints, worker
from shoal.training.pytorch.checkpoints import Checkpoints, Destination, Seals, shared_out
from shoal.training.pytorch.context import Context, tagged_output
from shoal.training.pytorch.engine import Metrics
from shoal.training.pytorch.program import MAX_PROGRAM_BYTES, Program
from shoal.training.pytorch.request import AnyScaling, SpreadScalingConfig, fitting, lay_out, nodes_needed
from shoal.training.pytorch.worker import Machine, environments
from shoal.training.reporting import Progress
from shoal.training.tracking import adopt_model

ONE_CPU: list[Node] = [{"name": f"n{i}", "cpus": 1, "gpus": 0} for i in range(2)]
GPUS: list[Node] = [{"name": "a", "cpus": 8, "gpus": 2}, {"name": "b", "cpus": 8, "gpus": 0}]


def of(nodes: int, per_node: int = 1, cpus: int = 1, gpus: int = 0) -> PyTorchScalingConfig:
    each = WorkerResourceConfig(num_cpus=cpus, num_gpus=gpus)
    return PyTorchScalingConfig(num_nodes=nodes, num_workers_per_node=per_node, resource_requirements_per_worker=each)


def spread(workers: int, cpus: int = 1, gpus: int = 0) -> SpreadScalingConfig:
    each = WorkerResourceConfig(num_cpus=cpus, num_gpus=gpus)
    return SpreadScalingConfig(num_workers=workers, resource_requirements_per_worker=each)


def test_workers_are_laid_out_on_nodes_that_have_room() -> None:
    assert lay_out(of(2), ONE_CPU) == GangShape(2, 1, per_node=1)
    assert lay_out(of(-1), ONE_CPU).num_workers == 2
    assert lay_out(of(-1, 2, 1, 1), GPUS) == GangShape(2, 1, 1, per_node=2)
    assert lay_out(of(1, 5, 0), ONE_CPU).num_workers == 5
    assert lay_out(spread(9), GPUS) == GangShape(9, 1)
    assert lay_out(spread(2, 0, 1), GPUS) == GangShape(2, 0, 1)


@pytest.mark.parametrize(
    ("cpus", "streams", "reserved", "workers_on_4_cpus"),
    [(1, 0, 1, 4), (1, 1, 0.5, 4), (1, 2, 0, 4), (1, 3, 0, 2), (0, 1, 0, 8), (4, 1, 2, 1), (4, 2, 2, 1)],
)
def test_workers_leave_cpus_to_ray_data(cpus: int, streams: int, reserved: float, workers_on_4_cpus: int) -> None:
    node = [Node(name="a", cpus=4, gpus=0)]
    layout = lay_out(spread(workers_on_4_cpus, cpus), node, ray_streams=streams)
    assert layout.cpus_per_worker == reserved
    assert workers_on_4_cpus * (reserved + layout.reading_cpus) <= 4
    said = "Ray Data needs" if streams * 0.5 > cpus else "4 CPUs|1 CPU"
    with pytest.raises(CapacityError, match=said):
        lay_out(spread(workers_on_4_cpus + 1, cpus), node, ray_streams=streams)


@pytest.mark.parametrize(
    ("config", "cpus", "gpus", "workers", "each"),
    [
        (of(1, -1, 1, -1), 8, 4, 4, 1),
        (of(1, -1, 1, -1), 3, 4, 3, 1),  # each worker needs a CPU
        (of(1, -1, 0, -1), 1, 4, 4, 1),
        (of(1, -1, 1, -1), 8, 0, 1, 0),
        (of(1, 2, 1, -1), 8, 4, 2, 2),
        (of(1, 3, 1, -1), 8, 4, 3, 1),
        (of(1, 2, 1, -1), 8, 1, 2, 0),
        (of(1, -1, 1, 2), 8, 4, 2, 2),
    ],
)
def test_workers_divide_all_gpus_of_a_node(
    config: PyTorchScalingConfig, cpus: int, gpus: int, workers: int, each: int
) -> None:
    nodes = [Node(name="small", cpus=cpus, gpus=0), Node(name="large", cpus=cpus, gpus=gpus)]
    layout = lay_out(config, nodes)
    assert (layout.num_workers, layout.gpus_per_worker) == (workers, each)
    with pytest.raises(InvalidArgumentError, match="num_gpus=-1 is allowed only in PyTorchScalingConfig"):
        spread(1, 1, -1)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (of(3), r"num_nodes=3 of 1 CPU for each worker does not fit: there is room for only 2 .* shoal.scale_cluster"),
        (of(1, 2), r"num_workers_per_node=2 of 1 CPU .* room for only 1 \(n0: 1 CPU, n1: 1 CPU\)"),
        (of(1, 1, 1, 1), "num_workers_per_node=1 of 1 CPU and 1 GPU for each worker"),
        (of(-1, 1, 2), "num_workers_per_node=1 of 2 CPUs"),
        (spread(3), "num_workers=3 of 1 CPU .* room for only 2 "),
    ],
)
def test_what_does_not_fit_is_refused(config: AnyScaling, says: str) -> None:
    with pytest.raises(CapacityError, match=says):
        lay_out(config, ONE_CPU)


def test_workers_need_the_active_nodes_and_further_ones() -> None:
    head, worker = Node(name="head", cpus=0, gpus=0), Node(name="worker", cpus=4, gpus=0)
    workers = SpreadScalingConfig(num_workers=9, resource_requirements_per_worker=WorkerResourceConfig(num_cpus=2))
    assert nodes_needed(workers, [], worker) == 5
    assert nodes_needed(workers, [head, worker], worker) == 6
    assert nodes_needed(workers, [worker] * 7, worker) == 5
    assert nodes_needed(workers, [worker] * 7, head) == 5
    assert nodes_needed(workers, [worker] * 4, head) is None


def test_only_nodes_whose_gpus_are_of_the_type_count() -> None:
    nodes = [
        Node(name="a", cpus=2, gpus=1, gpu_type="H100"),
        Node(name="b", cpus=2, gpus=1, gpu_type="A100"),
        Node(name="c", cpus=2, gpus=1, gpu_type=None),
        Node(name="d", cpus=2, gpus=1),  # of a pool that is looked at from outside, nobody knows
    ]
    each = WorkerResourceConfig(num_gpus=1, gpu_type="h100")
    assert [fitting(node, each) for node in nodes] == [1, 0, 0, 1]
    with pytest.raises(CapacityError, match=r"1 CPU and 1 H100 GPU .*b: 2 CPUs and 1 A100 GPU,"):
        lay_out(SpreadScalingConfig(num_workers=3, resource_requirements_per_worker=each), nodes)
    assert GangShape(1, 0).bundles == [{"memory": 1}]  # and no part of a CPU, which another group may need
    assert GangShape(2, 1, 1, "H100", per_node=2).bundles == [{"CPU": 2, "GPU": 2.0, "accelerator_type:H100": 0.001}]


def test_clamping_takes_what_there_is_but_something_there_must_be() -> None:
    with pytest.warns(UserWarning, match="num_nodes=3 .* reduced to 2"):
        assert lay_out(of(3), ONE_CPU, clamp=True).num_workers == 2
    with pytest.warns(UserWarning, match="num_workers_per_node=4 of 0 CPUs and 1 GPU .* reduced to 2"):
        assert lay_out(of(1, 4, 0, 1), GPUS, clamp=True) == GangShape(2, 0, 1, per_node=2)
    with pytest.raises(CapacityError):
        lay_out(of(1, 1, 1, 1), ONE_CPU, clamp=True)


@pytest.mark.parametrize(
    "wrong", [{"num_nodes": 0}, {"num_workers_per_node": 0}, {"num_workers_per_node": -2}, {"nodes": 2}]
)
def test_a_wrong_config_is_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        PyTorchScalingConfig(**wrong)


def test_the_environment_is_torchruns() -> None:
    machines = [
        Machine("a", "10.0.0.1", ("3",), 29500),
        Machine("a", "10.0.0.1", ("1",)),
        Machine("b", "10.0.0.2", ("0",)),
        Machine("b", "10.0.0.2", ("2",)),
    ]
    found = environments(machines, threads=2, restarts=1, max_restarts=3)
    assert [each["RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0", "1"]
    assert [each["GROUP_RANK"] for each in found] == ["0", "0", "1", "1"]
    assert {each["LOCAL_WORLD_SIZE"] for each in found} == {"2"}
    assert {each["MASTER_ADDR"] + ":" + each["MASTER_PORT"] for each in found} == {"10.0.0.1:29500"}
    # cuda:{LOCAL_RANK} is the worker's own.
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["3,1", "3,1", "0,2", "0,2"]
    assert found[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    parts = [Machine(node, "10.0.0.1", (part,)) for node, part in (("a", "MIG-1"), ("b", "MIG-2"), ("b", "MIG-3"))]
    assert environments(parts[:2], threads=1, restarts=0, max_restarts=0)[1]["CUDA_VISIBLE_DEVICES"] == "MIG-2"
    with pytest.raises(UnusableGpuError, match="gpus_per_node=1"):
        environments(parts, threads=1, restarts=0, max_restarts=0)
    assert "CUDA_VISIBLE_DEVICES" not in environments([Machine("a", "::1")], threads=1, restarts=0, max_restarts=0)[0]


def test_a_program_that_starts_others_is_no_rank() -> None:
    machine = Machine("a", "10.0.0.1", ("3",), 29500)
    (found,) = environments([machine], threads=2, restarts=0, max_restarts=3, is_launcher=True)
    assert found == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3"}


def test_outside_of_a_gang_one_is_rank_0_of_1(capsys: pytest.CaptureFixture[str]) -> None:
    context = Context()
    assert (context.get_rank(), context.get_world_size(), context.get_node_rank()) == (0, 1, 0)
    assert context.get_dataset_map() == {}
    assert context.get_checkpoint() is None
    context.save_checkpoint({"step": 3}, {"loss": 0.25})
    assert context.get_checkpoint() == {"step": 3}
    assert capsys.readouterr().out == "loss: 0.25\n"
    assert os.path.isdir(context.get_model_dir())
    os.rmdir(context.get_model_dir())
    assert get_context() is get_context()


def test_a_metric_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match='the metric "name" must be a number'):
        Context().get_metrics_reporter().log_metrics({"name": "resnet"})
    with pytest.raises(InvalidArgumentError, match='the metric "names" must be a number'):
        Context().get_metrics_reporter().log_metrics({"names": [1, "resnet"]})


@pytest.mark.parametrize("step", [2**63, 0.5, math.nan, "1"])
def test_a_step_that_mlflow_cannot_store_is_refused(step: Any) -> None:
    reporter = Context().get_metrics_reporter()
    reporter.log_metrics({"loss": 1.0}, step=3.0)
    with pytest.raises(InvalidArgumentError, match="the step of metrics must be a whole number"):
        reporter.log_metrics({"loss": 2.0}, step=step)


def test_a_list_of_numbers_is_logged_as_steps() -> None:
    seen: list[tuple[dict[str, float], int | None]] = []
    Context(report=lambda metrics, step: seen.append((metrics, step))).get_metrics_reporter().log_metrics(
        {"seconds": 3, "accuracy": [0.5, 0.75]}, step=9
    )
    assert seen == [({"seconds": 3.0}, 9), ({"accuracy": 0.5}, 0), ({"accuracy": 0.75}, 1)]


class Sink:
    """Receives the metrics of all ranks."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def log(self, rank: int, values: Mapping[str, float], step: int) -> None:
        self.seen.append((rank, step))

    def continued(self) -> None:
        raise NotImplementedError


def test_metrics_are_counted_by_rank_and_rank_0s_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Sink()
    records: list[Progress] = []
    with Metrics(sink, records.append) as metrics:
        metrics.note(0, {"metrics": {"loss": 1.0}, "step": None})
        metrics.note(1, {"metrics": {"loss": 2.0}, "step": None})
        metrics.note(0, {"metrics": {"loss": 0.5}, "step": None})
        metrics.note(0, {"metrics": {"accuracy": 0.9}, "step": 7})
    assert sink.seen == [(0, 0), (1, 0), (0, 1), (0, 7)]
    assert metrics.last == {"loss": 0.5, "accuracy": 0.9}
    assert records[1:] == [
        Progress(1, None, "steps", {"loss": 0.5}),
        Progress(7, None, "steps", {"loss": 0.5, "accuracy": 0.9}),
    ]
    assert capsys.readouterr().out == "step 0, loss: 1\n"  # the others would have come within 10 s of it


KEY = b"of this run"


class Told:
    """A driver to whom rank 0 tells the seals of its checkpoints."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seals: Seals = {}
        self.there: list[list[str]] = []

    def worker(self, key: bytes = KEY) -> Checkpoints:
        """A worker of a gang that starts now."""
        checkpoints = Checkpoints(self.folder, key)
        checkpoints.known_seals, checkpoints.send_seals = self.seals, self.hear
        return checkpoints

    def hear(self, seals: Seals) -> None:
        self.seals = dict(seals)
        self.there.append(sorted(path.name[:8] for path in Path(self.folder).glob("*.pt")))


class Opened:
    """Makes a folder when it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


def test_the_two_newest_checkpoints_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    driver = Told(str(tmp_path / "job"))
    checkpoints = driver.worker()
    assert checkpoints.load() is None
    assert checkpoints.latest() is None
    for step in range(3):
        checkpoints.save({"step": step, "weights": torch.full((2,), float(step))})
    assert [path.name[:8] for path in files_of(tmp_path / "job")] == ["00000002", "00000003"]
    assert list(driver.seals) == [2, 3]
    assert driver.there == [[], ["00000001"], ["00000001", "00000002"]]  # told before the newest was there
    # As a process that was killed while it wrote leaves it.
    (tmp_path / "job" / "tmp123").write_bytes(b"half")
    other = driver.worker()
    assert other.load()["step"] == 2
    assert other.latest() == 3


def test_another_rank_reads_what_rank_0_has_just_saved(tmp_path: Path) -> None:
    driver = Told(str(tmp_path / "job"))
    first, other = driver.worker(), driver.worker()
    for step in range(3):
        first.save({"step": step})
        assert other.load() == {"step": step}


def test_a_state_of_any_kind_is_kept(tmp_path: Path) -> None:
    checkpoints = Told(str(tmp_path / "job")).worker()
    checkpoints.save({"rate": np.float64(0.5), "path": tmp_path})
    assert checkpoints.load() == {"rate": np.float64(0.5), "path": tmp_path}


def test_a_changed_checkpoint_is_not_unpickled_and_the_one_before_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Told(str(tmp_path / "job"))
    checkpoints = driver.worker()
    for step in range(3):
        checkpoints.save({"step": step})
    newest = files_of(tmp_path / "job")[-1]
    torch.save(Opened(tmp_path / "opened"), newest)
    torch.save(Opened(tmp_path / "opened"), tmp_path / "job" / f"00000099-{'0' * 64}.pt")
    resumed = driver.worker()
    assert resumed.load() == {"step": 1}
    assert "checkpoint 3 in" in capsys.readouterr().out
    resumed.save({"step": 5})
    assert driver.worker().load() == {"step": 5}
    for path in files_of(tmp_path / "job"):
        torch.save(Opened(tmp_path / "opened"), path)
    with pytest.raises(TrainingError, match=r"no checkpoint in .* is valid"):
        driver.worker().load()
    assert not (tmp_path / "opened").exists()


def test_a_checkpoint_that_is_older_than_those_told_or_of_another_run_is_not_read(tmp_path: Path) -> None:
    driver = Told(str(tmp_path / "job"))
    checkpoints = driver.worker()
    checkpoints.save({"step": 0})
    [old] = files_of(tmp_path / "job")
    content = old.read_bytes()
    for step in (1, 2):
        checkpoints.save({"step": step})
    for path in files_of(tmp_path / "job"):
        path.unlink()
    old.write_bytes(content)
    assert driver.worker().load() is None
    assert Checkpoints(driver.folder, b"of another run").load() is None


def test_a_checkpoint_that_was_told_and_never_written_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Told(str(tmp_path / "job"))
    checkpoints = driver.worker()
    for step in range(2):
        checkpoints.save({"step": step})

    def killed(seals: Seals) -> None:
        driver.hear(seals)
        raise KeyboardInterrupt

    last = driver.worker()
    last.send_seals = killed
    with pytest.raises(KeyboardInterrupt):
        last.save({"step": 2})
    assert list(driver.seals) == [2, 3]
    resumed = driver.worker()
    assert resumed.load() == {"step": 1}
    resumed.save({"step": 3})
    assert driver.worker().load() == {"step": 3}


@pytest.mark.parametrize("folder", ["memory://bucket/job", "memory://bucket/run[1]/job"])
def test_checkpoints_go_to_any_filesystem(folder: str) -> None:
    checkpoints = Checkpoints(folder, KEY)
    for step in range(3):
        checkpoints.save({"step": step})
    resumed = Checkpoints(folder, KEY)
    resumed.known_seals = checkpoints.known_seals
    assert resumed.load() == {"step": 2}
    assert checkpoints.latest() == 3


def test_model_folders_are_merged_and_of_two_that_differ_the_first_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        (folder / "deep").mkdir(parents=True)
        (folder / "same").write_text("same")
        (folder / "differs").write_text(str(rank))
        (folder / "deep" / f"of-{rank}").write_text("x")
    files = [checkpoints.digests(tmp_path / str(rank)) for rank in (0, 1)]
    parts = shared_out(files)
    assert parts == [["deep/of-0", "differs", "same"], ["deep/of-1"]]
    assert (
        "the file differs in the model folder differs between the ranks: the file of rank 0 is kept"
        in capsys.readouterr().out
    )
    destination = Destination(str(tmp_path / "out"), Claim("job", "me"), lambda: True)
    for text in ("1", "2"):  # the second run of a job replaces what the first has left
        (tmp_path / "0" / "differs").write_text(text)
        destination.prepare()
        for rank, part in enumerate(parts):
            checkpoints.upload(tmp_path / str(rank), part, destination.staging)
        final = Path(destination.commit([*parts[0], *parts[1]]))
    assert final == tmp_path / "out" / "model" / "job"
    assert sorted(path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()) == [
        MARKER, "deep/of-0", "deep/of-1", "differs", "same",
    ]  # fmt: skip
    assert (final / "differs").read_text() == "2"
    assert [path.name for path in (tmp_path / "out" / "model").iterdir()] == ["job"]


def test_a_model_that_did_not_arrive_is_not_there(tmp_path: Path) -> None:
    destination = Destination(str(tmp_path), Claim("job", "me"), lambda: True)
    destination.prepare()
    with pytest.raises(TrainingError, match=r"1 model files, such as weights, are missing .* all nodes"):
        destination.commit(["weights"])
    destination.discard()
    assert list((tmp_path / "model").iterdir()) == []


def test_a_model_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "model" / "job"
    theirs.mkdir(parents=True)
    (theirs / "thesis.tex").write_text("years of work")
    destination = Destination(str(tmp_path), Claim("job", "me"), lambda: True)
    with pytest.raises(InvalidArgumentError, match="is not empty, and job"):
        destination.check()
    destination.prepare()
    with pytest.raises(TrainingError, match="is not empty, and job"):
        destination.commit([])
    destination.discard()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["job"]
    assert (theirs / "thesis.tex").read_text() == "years of work"


def published(location: Path, claim: Claim, content: str, may_publish: Callable[[], bool] = lambda: True) -> None:
    destination = Destination(str(location), claim, may_publish)
    destination.prepare()
    Path(destination.staging, "weights").write_text(content)
    destination.commit(["weights"])


def test_an_older_attempt_does_not_publish_over_a_newer_one(tmp_path: Path) -> None:
    published(tmp_path, Claim("job", "me", 2), "new")
    with pytest.raises(TrainingError, match="belongs to attempt 2"):
        published(tmp_path, Claim("job", "me", 1), "old")
    assert (tmp_path / "model" / "job" / "weights").read_text() == "new"
    published(tmp_path, Claim("job", "me", 3), "newer")
    assert (tmp_path / "model" / "job" / "weights").read_text() == "newer"
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["job"]  # what attempt 1 has left is gone, too


def test_an_attempt_that_was_paused_before_it_published_asks_whether_it_still_may(tmp_path: Path) -> None:
    published(tmp_path, Claim("job", "me", 1), "old")
    answers = iter([True, False])  # when it prepares, and when it has uploaded
    with pytest.raises(TrainingError, match='attempt 2 of job "job" has ended, or a newer attempt has begun'):
        published(tmp_path, Claim("job", "me", 2), "paused", lambda: next(answers))
    assert (tmp_path / "model" / "job" / "weights").read_text() == "old"


def test_a_folder_that_cannot_be_looked_into_keeps_no_model_from_being_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tmp_path, Claim("job", "me", 1), "old")
    for kind in ("partial", "replaced"):
        (tmp_path / "model" / f".job.0.{kind}" / MARKER).mkdir(parents=True)  # a folder where a file should be
    published(tmp_path, Claim("job", "me", 2), "new")
    assert (tmp_path / "model" / "job" / "weights").read_text() == "new"
    assert capsys.readouterr().out.count("could not be removed") == 2


def test_a_model_is_back_after_its_replacement_was_killed_between_two_renames(tmp_path: Path) -> None:
    published(tmp_path, Claim("job", "me", 1), "old")
    (tmp_path / "model" / "job").rename(tmp_path / "model" / ".job.2.replaced")
    Destination(str(tmp_path), Claim("job", "me", 3), lambda: True).check()
    assert (tmp_path / "model" / "job" / "weights").read_text() == "old"
    published(tmp_path, Claim("job", "me", 3), "new")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["job"]


def test_what_a_rank_prints_is_tagged_line_by_line() -> None:
    lines: list[str] = []
    with tagged_output(2, lines.append):
        print("one\ntwo", end="")
        print("!", file=sys.stdout)
        print("10%\r50%\r100%", file=sys.stderr)
        sys.stdout.buffer.write(b"\xff\n")
        print("rest", end="")
    assert lines == [f"[rank 2] {line}" for line in ("one", "two!", "100%", "\ufffd", "rest")]


def test_a_function_is_checked_against_its_arguments() -> None:
    def train(epochs: int, *, rate: float = 0.1) -> None: ...

    assert Program.of(train, [1], {"rate": 0.2}).args == (1,)
    with pytest.raises(
        InvalidArgumentError,
        match="train cannot be called with the given arguments: missing a required argument: 'epochs'",
    ):
        Program.of(train, [], {})
    with pytest.raises(
        InvalidArgumentError,
        match="train cannot be called with the given arguments: got an unexpected keyword argument 'rat'",
    ):
        Program.of(train, [1], {"rat": 0.2})
    with pytest.raises(InvalidArgumentError, match="must be a function or the path of a script, not 3"):
        PyTorchDistributor(3)  # type: ignore[arg-type]


async def coroutine() -> int:
    return 1


def generator() -> Iterator[int]:
    yield 1


class GeneratorObject:
    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("function", [coroutine, generator, partial(generator), GeneratorObject()], ids=str)
def test_a_function_whose_call_does_not_run_its_code_is_refused(function: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is (an async|a generator) function, whose call returns before"):
        PyTorchDistributor(function)


def test_a_returned_ddp_model_can_be_read_without_a_process_group(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        content = worker._pickled(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)))
    finally:
        torch.distributed.destroy_process_group()
    assert isinstance(content, bytes)
    assert type(cloudpickle.loads(content)) is torch.nn.Linear


def test_a_model_that_ends_after_its_process_group_does_not_stop_its_rank(tmp_path: Path) -> None:
    """Plain PyTorch hangs within a few of these calls."""
    code = f"""if True:
        import torch, torch._dynamo
        from torch import distributed
        from shoal.training.pytorch.worker import keep_groups

        def train(number):
            distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/{{number}}", rank=0, world_size=1)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()
            distributed.destroy_process_group()

        keep_groups()
        for number in range(200):
            train(number)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_large_data_in_a_closure_is_refused_with_advice() -> None:
    data = np.zeros(MAX_PROGRAM_BYTES, np.uint8)

    def train() -> int:
        return int(data.sum())

    with pytest.raises(InvalidArgumentError, match=r"train is 64 MiB large .* dataset_map"):
        Program.of(train, [], {}).dumps()


def test_run_local_is_rank_0_of_1_with_a_process_group(tmp_path: Path) -> None:
    before = dict(os.environ)

    def train(epochs: int) -> tuple[int, float, dict[str, object], list[str]]:
        torch.distributed.init_process_group("gloo")
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        context = get_context()
        return epochs, float(total), context.get_hyper_params(), list(context.get_dataset_map())

    data = {"rows": DataConnector.from_parquet(tmp_path)}
    assert run_local(train, 3, dataset_map=data, hyper_params={"rate": 1}) == (3, 1.0, {"rate": 1}, ["rows"])
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
    with pytest.raises(ZeroDivisionError):
        run_local(lambda: 1 / 0)
    assert dict(os.environ) == before
    assert get_context().get_hyper_params() == {}


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_wrong_number_of_processes_or_of_their_gpus_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="num_processes must be a positive whole number"):
        TorchDistributor(wrong)
    with pytest.raises(InvalidArgumentError, match="gpus_per_process must be a positive whole number"):
        TorchDistributor(gpus_per_process=wrong)
    with pytest.raises(InvalidArgumentError, match="gpus_per_process=2 requires use_gpu=True"):
        TorchDistributor(use_gpu=False, gpus_per_process=2)


class _Tracking:
    """Stands for MLflow as `adopt_model` uses it; `model` is what user code logged last."""

    def __init__(self, model: Any) -> None:
        self.last_logged_model = lambda: model
        self.entities = SimpleNamespace(LoggedModelOutput=lambda model_id, step: (model_id, step))
        self.outputs: list[Any] = []

    def MlflowClient(self) -> Any:
        return SimpleNamespace(log_outputs=lambda run_id, models: self.outputs.append((run_id, models)))


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (SimpleNamespace(model_id="m-1", source_run_id=None), [("run-1", [("m-1", 0)])]),
        (SimpleNamespace(model_id="m-1", source_run_id="another"), []),
        (None, []),
    ],
    ids=["without a run", "of another run", "none"],
)
def test_a_model_logged_without_a_run_counts_as_the_jobs(
    monkeypatch: pytest.MonkeyPatch, model: Any, outputs: list[Any]
) -> None:
    tracking = _Tracking(model)
    monkeypatch.setitem(sys.modules, "mlflow", tracking)  # type: ignore[arg-type]
    monkeypatch.setenv("MLFLOW_RUN_ID", "run-1")
    adopt_model(pytest.fail)
    assert tracking.outputs == outputs
    monkeypatch.delenv("MLFLOW_RUN_ID")
    adopt_model(pytest.fail)
    assert tracking.outputs == outputs


def test_a_model_that_cannot_be_counted_is_told_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setenv("MLFLOW_RUN_ID", "run-1")
    told: list[str] = []
    adopt_model(told.append)
    assert told
    assert "could not be assigned to the job's run" in told[0]
