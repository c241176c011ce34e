from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CapacityError, CapacityTimeoutError, DataError, TrainingError, WorkerLostError
from shoal.secrets.hidden_output import SECRETS
from shoal.training.gang import placement, ray_actors
from shoal.training.gang.connection import WorkerConnections
from shoal.training.gang.gang import Gang, end_gangs, shared_gang
from shoal.training.gang.placement import GangShape
from shoal.training.gang.worker import PeerError
from shoal.training.reporting import gang_context
from tests.support.two_node_cluster import TwoNodes, assert_ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray

TWO = GangShape(2, 1.0)


def where_am_i(*args: Any) -> tuple[Any, ...]:
    import ray

    context = gang_context()
    return context.rank, context.world_size, context.local_world_size, ray.get_runtime_context().get_node_id(), args


def raise_in(rank: int, error: Exception, others: str) -> None:
    if gang_context().rank == rank:
        raise error
    if others == "peer error":
        raise PeerError("connection reset")
    threading.Event().wait()


def terminate_rank_1() -> None:
    try:
        if gang_context().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(30)
    except BaseException as error:
        raise RuntimeError("user code caught the end of its process") from error


def assert_gone(gang: Gang) -> None:
    # Their sockets are closed before `end` returns; the rest of an exit takes the kernel a few milliseconds.
    assert_ended([worker.pid for worker in gang.workers])


def test_ranks_follow_the_nodes_and_results_the_ranks(driver: TwoNodes) -> None:
    with shared_gang(TWO) as gang:
        results = gang.run(where_am_i, [("x",), ("y",)])
    head, second = driver.cluster.head_node, driver.second
    assert results == [(0, 2, 1, head.node_id, ("x",)), (1, 2, 1, second.node_id, ("y",))]
    assert [worker.node for worker in gang.workers] == ["a-head", "b"]
    assert gang.host == "127.0.0.1"


def test_what_workers_log_is_printed_here_before_the_run_returns(
    driver: TwoNodes, capsys: pytest.CaptureFixture
) -> None:
    def talk() -> None:
        for line in range(100):
            gang_context().log(f"{gang_context().rank}: {line}")

    with shared_gang(TWO) as gang:
        gang.run(talk, [(), ()])
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"{rank}:")] == [f"{rank}: {line}" for line in range(100)]


def test_workers_enter_the_jobs_folder_and_share_a_temporary_one_where_it_does_not_exist(
    driver: TwoNodes, tmp_path: Path
) -> None:
    with shared_gang(TWO, env={"PWD": str(tmp_path)}) as gang:
        assert gang.run(os.getcwd, [(), ()]) == [str(tmp_path)] * 2
    with shared_gang(TWO, env={"PWD": str(tmp_path / "on" / "another" / "host")}) as gang:
        folders = gang.run(os.getcwd, [(), ()])
        assert all(Path(folder).name.startswith("shoal-work-") for folder in folders)
        assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in folders)
    end_gangs()
    assert tmp_path.is_dir()
    assert not any(Path(folder).exists() for folder in folders)


def test_sockets_of_workers_stay_on_loopback_where_the_gang_is_on_the_drivers_node() -> None:
    assert ray_actors._listen_on("10.0.0.1", "a", ["a", "a"]) == "127.0.0.1"
    assert ray_actors._listen_on("10.0.0.1", "a", ["a", "b"]) == "10.0.0.1"
    assert ray_actors._listen_on("10.0.0.1", "a", ["b"]) == "10.0.0.1"


def test_a_gang_is_reused_by_the_next_run_of_its_shape(driver: TwoNodes) -> None:
    with shared_gang(TWO) as first:
        pass
    with shared_gang(TWO) as second:
        assert second is first
    with shared_gang(GangShape(1, 1.0)) as other:
        # It held the CPUs that another shape may need.
        assert first.ended
        assert other is not first


def test_environment_reaches_the_workers_alone(driver: TwoNodes) -> None:
    with shared_gang(TWO, env={"SHOAL_TEST_SECRET": "s3cret"}) as gang:
        assert gang.run(os.getenv, [("SHOAL_TEST_SECRET",)] * 2) == ["s3cret", "s3cret"]
    assert "SHOAL_TEST_SECRET" not in os.environ
    with shared_gang(TWO) as other:
        assert other is not gang


@pytest.mark.parametrize(
    ("error", "expected", "others"),
    [
        pytest.param(DataError("null label"), DataError, "peer error", id="data"),
        pytest.param(DataError("null label"), DataError, "wait", id="data, others wait", marks=pytest.mark.long),
        pytest.param(KeyError("x"), TrainingError, "peer error", id="other", marks=pytest.mark.long),
        pytest.param(KeyError("x"), TrainingError, "wait", id="other, others wait"),
    ],
)
def test_the_first_cause_is_raised_with_its_rank_and_traceback(
    driver: TwoNodes, error: Exception, expected: type[Exception], others: str
) -> None:
    with pytest.raises(expected) as caught, shared_gang(TWO) as gang:
        gang.run(raise_in, [(1, error, others)] * 2)
    worker = gang.workers[1]
    assert type(caught.value) is expected
    assert str(error) in str(caught.value)
    assert f"rank 1 (node b, pid {worker.pid})" in str(caught.value)
    assert any("raise error" in note for note in caught.value.__notes__)
    assert gang.ended
    assert_gone(gang)


def test_a_failed_gang_is_not_reused(driver: TwoNodes) -> None:
    with pytest.raises(TrainingError), shared_gang(TWO) as failed:
        failed.run(raise_in, [(0, ValueError("x"), "wait")] * 2)
    with shared_gang(TWO) as gang:
        assert gang is not failed
        assert gang.run(where_am_i, [(), ()])[0][0] == 0


def test_a_gang_whose_worker_died_between_runs_is_not_reused(driver: TwoNodes) -> None:
    with shared_gang(TWO) as dead:
        pass
    os.kill(dead.workers[1].pid, 9)
    assert dead._failed.wait(30)
    with shared_gang(TWO) as gang:
        assert gang is not dead
        assert gang.run(where_am_i, [(), ()])[1][0] == 1


def test_a_worker_that_died_between_two_calls_is_told(driver: TwoNodes) -> None:
    with shared_gang(TWO) as gang:
        os.kill(gang.workers[1].pid, signal.SIGKILL)
        wait_until(lambda: not gang.sound, "the driver to miss the worker")
        with pytest.raises(WorkerLostError, match=r"rank 1 .* was lost"):
            gang.run(where_am_i, [(), ()])
    assert_gone(gang)


def test_a_worker_that_got_sigterm_is_lost_and_its_function_has_not_failed(driver: TwoNodes) -> None:
    with pytest.raises(WorkerLostError, match=r"rank 1 .* was lost"), shared_gang(TWO) as gang:
        gang.run(terminate_rank_1, [(), ()])
    assert_gone(gang)


def test_hellos_that_are_read_late_are_waited_for(driver: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = WorkerConnections._accept

    def busy(board: WorkerConnections) -> None:
        time.sleep(0.5)  # the thread that reads them gets no turn
        accept(board)

    end_gangs()
    monkeypatch.setattr(WorkerConnections, "_accept", busy)
    with shared_gang(TWO) as gang:
        assert gang.sound


def test_a_time_limit_ends_it(driver: TwoNodes) -> None:
    with pytest.raises(TrainingError, match="time limit"), shared_gang(TWO) as gang:
        gang.run(raise_in, [(9, ValueError("x"), "wait")] * 2, timeout=0.5)
    assert_gone(gang)


def test_a_result_that_cannot_be_pickled(driver: TwoNodes) -> None:
    with pytest.raises(TrainingError, match=r"pickle|serializ"), shared_gang(TWO) as gang:
        gang.run(threading.Lock, [(), ()])


def test_ctrl_c_ends_it(driver: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gang: Gang, deadline: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Gang, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt), shared_gang(TWO) as gang:
        gang.run(raise_in, [(9, ValueError("x"), "wait")] * 2)
    assert_gone(gang)


@pytest.mark.parametrize("shape", [GangShape(3, 1.0), GangShape(1, 2.0), GangShape(1, 1.0, gpus_per_worker=1)], ids=str)
def test_what_can_never_fit_is_refused_at_once(driver: TwoNodes, shape: GangShape) -> None:
    end_gangs()
    with pytest.raises(CapacityError, match="scale_cluster"):
        Gang.start(shape)


def test_busy_cpus_are_waited_for_aloud_until_the_deadline(
    driver: TwoNodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    end_gangs()
    holder = Gang.start(GangShape(1, 1.0))
    monkeypatch.setattr(placement, "FIRST_WAIT_MESSAGE_S", 0.2)
    try:
        with pytest.raises(CapacityTimeoutError, match="did not get the resources"):
            Gang.start(TWO, timeout=2.0)
        assert "waiting for 2 workers of 1 CPU" in capsys.readouterr().out
    finally:
        holder.end()
    # The group that was refused has left nothing behind that holds CPUs.
    Gang.start(TWO).end()


def start_two() -> str:
    """Return the error of a gang of two that this worker wants to start beside its own."""
    try:
        Gang.start(TWO, timeout=60).end()
    except CapacityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("own", "says"), [(GangShape(1, 0), ""), (GangShape(1, 1.0), "holds 1 CPU itself")], ids=str)
def test_a_worker_waits_for_no_cpu_that_only_its_end_would_free(driver: TwoNodes, own: GangShape, says: str) -> None:
    end_gangs()
    gang = Gang.start(own)
    try:
        (said,) = gang.run(start_two, [()])
    finally:
        gang.end()
    assert says in said and bool(said) == bool(says)


def test_two_threads_of_a_driver_have_a_gang_each(driver: TwoNodes) -> None:
    one_each = GangShape(1, 1.0)
    both = threading.Barrier(2)
    seen = []

    def train() -> None:
        with shared_gang(one_each) as gang:
            both.wait(60)
            seen.append(gang.run(os.getpid, [()])[0])

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(set(seen)) == 2


def test_a_driver_that_exits_leaves_no_process(driver: TwoNodes, tmp_path: Path) -> None:
    import subprocess
    import sys

    end_gangs()
    script = f"""
import os, ray
ray.init(address={driver.address!r}, log_to_driver=False, logging_level="ERROR")
from shoal.training.gang.placement import GangShape
from shoal.training.gang.connection import WorkerConnections
from shoal.training.gang.gang import shared_gang
with shared_gang(GangShape(2, 1.0)) as gang:
    print(*gang.run(os.getpid, [(), ()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The gang ends before the driver does.
    assert_ended([int(pid) for pid in done.stdout.split()])


def test_a_worker_that_dies_while_it_joins(driver: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    end_gangs()

    class Frail(ray_actors.Worker):
        def join(self, *args: Any) -> int:
            os.kill(os.getpid(), 9)
            return 0

    monkeypatch.setattr(ray_actors, "Worker", Frail)
    with pytest.raises(WorkerLostError, match=r"rank 0 \(node a-head\) was lost while it started"):
        Gang.start(TWO)


def test_the_log_files_of_ray_lose_the_secrets_of_workers(driver: TwoNodes) -> None:
    secret = "\n".join(["-----BEGIN KEY-----", "MIIEvQIBADANsecretline1", "AoGBAJ7secretline2222", "-----END KEY-----"])

    def leak() -> list[str]:
        import subprocess
        import sys

        first, second = os.environ["TLS_PEM"].splitlines()[1:3]
        print("python", first)
        print("error", [os.environ["TLS_PEM"]], file=sys.stderr)
        subprocess.run(["sh", "-c", f"echo subprocess {second}"], check=True)
        return [*os.environ]

    end_gangs()
    gang = Gang.start(GangShape(1, 1.0), env={"TLS_PEM": secret, SECRETS: json.dumps([secret])})
    pid = gang.workers[0].pid
    try:
        [variables] = gang.run(leak, [()])
    finally:
        gang.end()

    logs = Path(driver.cluster.head_node.get_session_dir_path(), "logs")

    def printed() -> str:
        return "".join(file.read_text() for file in sorted(logs.glob(f"worker-*-{pid}.*")))

    wait_until(lambda: "subprocess ***" in printed() and "error [" in printed(), "output in Ray's files")
    assert "python ***" in printed() and "error ['***']" in printed()
    assert "secretline" not in printed()
    assert "TLS_PEM" in variables and SECRETS not in variables
