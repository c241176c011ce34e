"""The supervisor process of one local node. Its command is ``python -m shoal.pool.supervisor NODE_ID EPOCH``, where
EPOCH is how many times the pool had been started when the node was planned.

The supervisor claims its node's row (writes its own process id there) before it starts the node. Then it reads the row
every second, unless the host's reconciler runs and has seen no change of the store. It ends the node and itself when
the row is deleted, belongs to another supervisor, or has the state `ending`. So a node without a valid row does not
keep running, even if the process that planned the node was paused or killed. While the store cannot be reached, the
node keeps running, for at most an hour (STORE_PATIENCE).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.boosting_libraries import MLFLOW_STORE
from shoal.errors import CapacityError, StoreError
from shoal.node_register import NodeRegister, RegisteredNode
from shoal.os_processes import ProcessId
from shoal.own_pauses import waited_since
from shoal.pool import timeouts
from shoal.pool.backends import versions
from shoal.pool.backends.local import backend, gpus, processes
from shoal.pool.backends.local.backend import node_folder, token_path
from shoal.pool.backends.local.job_server import JobServer
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.endpoint import NO_GCS, REGISTER
from shoal.pool.journal import sizes
from shoal.pool.journal.rows import JournalStep, transaction
from shoal.pool.reconciling import changes_seen, ensure_running, lock_path
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.changes import UNCHANGED_PERIOD
from shoal.state.home import open_locked
from shoal.state.private_folders import remove_own_folder, turn_lock
from shoal.state.schema import Node, NodeState, Pool

if TYPE_CHECKING:
    from shoal.pool.backends.local.raylet import Raylet


STARTS_AT_ONCE = (os.cpu_count() or 1) + 1
"""Number of nodes that may start at the same time on this host: one more than the host has cores. A starting node keeps
one core busy with the imports of its agents. When the node has to wait, another node can use the core."""


class Member(Protocol):
    """Interface through which a supervisor watches and ends its running node: a Ray node, a node without Ray, or a
    small substitute process in the crash tests."""

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the node's addresses as a dict from name to address. The supervisor writes this dict to the node's
        row."""

    def dead(self) -> str | None:
        """Return the reason why the node cannot be used any more, or None if the node works."""

    def busy(self) -> bool:
        """Return whether work is running on the node."""

    def drain(self, seconds: float, reason: str) -> None:
        """Stop giving new work to the node."""

    def stop(self) -> None:
        """End the node."""


Start = Callable[[Node, PoolSpec, str | None, Path], Member]
"""Function that starts a node. Its arguments are the node's row, the pool's spec, the address of the head (None if the
node is the head; the folder of the register of nodes if the pool runs without Ray), and the node's folder."""

Load = Callable[[PoolSpec], Start]
"""Function that imports all modules needed to start a node of a pool, and returns the function that starts the node.
Importing and starting are separate, because any number of nodes may import at the same time, but the number of
concurrent starts is limited (`STARTS_AT_ONCE`)."""


def load_node(spec: PoolSpec) -> Start:
    """Import the modules that a pool's nodes need, such as Ray, and return a function that starts a node."""

    def job_server(spec: PoolSpec, folder: Path) -> JobServer:
        asked = spec.library_names()
        libraries = [*asked, *(["ray"] if asked and spec.ray else []), *([MLFLOW_STORE] if "mlflow" in asked else [])]
        return JobServer(folder, token_path(spec.name).read_text().strip(), libraries)

    if spec.ray:
        from shoal.pool.backends.local.raylet import Raylet

    def start(node: Node, spec: PoolSpec, head: str | None, folder: Path) -> Member:
        if not spec.ray:
            member = NodeWithoutRay(node, NodeRegister(Path(head) if head else NodeRegister.path_in(folder)), folder)
            if head:
                return member
            jobs = job_server(spec, folder)
            return Head(member, jobs, jobs.busy)
        if head or spec.ray_dashboard:
            return Raylet(node, spec, head, folder)
        # If the fork server of the job server has libraries to import, it does so while Ray starts.
        early = job_server(spec, folder) if spec.libraries else None
        try:
            raylet = Raylet(node, spec, head, folder)
            return Head(raylet, early or job_server(spec, folder), raylet.busy)
        except BaseException:
            if early:
                early.close()
            raise

    return start


def log_failure(node: str, error: Exception) -> str:
    """Log that a node could not start or has failed, and return the error for the node's row."""
    log.error("%s failed", node, exc_info=error)
    hints = [hint for hint in (_load(error), versions.untested_ray()) if hint]
    return f"{type(error).__name__}: {error}" + (f" ({'; '.join(hints)})" if hints else "")


def _load(error: Exception) -> str | None:
    """Return the load of this machine, if the start has taken longer than Ray allows: it does where many processes
    run."""
    if not isinstance(error, TimeoutError) and "timed out" not in str(error):
        return None
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return (
        f"the load average of this machine is {load:.1f}, with {cpus} CPUs: if other work keeps it busy, start the "
        "node again later, or start fewer nodes"
    )


class Head:
    """The head node of a pool, which also runs the drivers of jobs; with Ray, instead of Ray's dashboard.

    Args:
        node: The head as a node.
        jobs: Server that runs the drivers of jobs.
        busy: Function that returns whether the head is in use.
    """

    def __init__(self, node: Raylet | NodeWithoutRay, jobs: JobServer, busy: Callable[[], bool]) -> None:
        self._node = node
        self._jobs = jobs
        self.dead = node.dead
        self.busy = busy
        self.drain = node.drain

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the node's addresses, including the URL of the Job API (``api``)."""
        return {**self._node.endpoint, "api": self._jobs.url}

    def stop(self) -> None:
        """End the drivers of jobs and the node."""
        self._jobs.close()
        self._node.stop()


class NodeWithoutRay:
    """A node of a pool without Ray, which is a part of its supervisor process. The drivers of jobs start their workers
    as plain processes, and reserve the CPUs in the pool's register of nodes.

    Args:
        row: The node's row.
        register: Register of the pool's nodes.
        folder: The node's folder.
    """

    def __init__(self, row: Node, register: NodeRegister, folder: Path) -> None:
        environment = {NODE_TAG: row.id, "TMPDIR": str(folder)}
        entry = RegisteredNode(row.id, row.name, row.is_head, row.cpus, str(folder), os.getpid(), environment)
        self._register = register
        self._registration = register.add(entry)
        self.busy = self._registration.is_in_use
        self.stop = self._registration.remove

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the folder of the register. The entries for Ray's address and Ray's node id are empty, because the
        pool runs without Ray."""
        return {REGISTER: str(self._register.folder), "gcs": NO_GCS, "ray_node_id": ""}

    def dead(self) -> str | None:
        """Return None. This node is a part of its supervisor process, so it cannot die while the supervisor runs."""
        return None

    def drain(self, seconds: float, reason: str) -> None:
        """Let drivers place no new workers on the node, and tell those of running jobs that it will shut down."""
        self._registration.leave_soon()


log = logging.getLogger("shoal.supervisor")


class _Ended(Exception):
    """Signal that the node and its supervisor have to end. The message is the reason."""


class Supervisor:
    """The supervisor of one node. It starts, watches and ends the node.

    Args:
        node_id: Id of the node's row.
        epoch: Epoch of the pool (how many times it was started) in which the node was planned. The supervisor ends when
            the node's row has another epoch.
        load: Function that returns the function that starts the node.
    """

    def __init__(self, node_id: str, epoch: int, load: Load) -> None:
        self._id = node_id
        self._epoch = epoch
        self._load = load
        self._me = ProcessId.mine()
        self._folder = node_folder(node_id)
        self._gpus: gpus.GpuClaim | None = None
        self._stopping = False
        self._store_seen = self._begun = time.monotonic()
        self._lock = lock_path()
        self._sign: object = None
        self._row: Node | None = None

    def run(self) -> int:
        """Start the node, watch the node until it ends, and return the exit code for the supervisor process."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._store = Store(migrate=False)
        claimed = self._claim()
        if claimed is None:
            log.info("node %s is not started: its row was deleted or changed, or has another supervisor", self._id)
            return 0
        node, spec, gcs, embedded = claimed
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # The inherited TMPDIR may be the folder of another node, which may have been removed in the meantime. So this
        # node uses its own folder.
        os.environ["TMPDIR"] = str(self._folder)
        member: Member | None = None
        try:
            start = self._load(spec)
            self._gpus = self._claim_gpus(node, spec.gpus_per_node, embedded=embedded)
            member = self._in_turn(lambda: start(node, spec, gcs, self._folder))
            self._checked_row()  # raises _Ended if the start deadline has passed
            endpoint = {**member.endpoint, **versions.to_record(versions.mine())}
            self._report_until_written(state=NodeState.READY, endpoint=endpoint, gpus=node.gpus)
            log.info("%s is ready", node.name)
            self._watch(member)
        except _Ended as reason:
            log.info("%s ends: %s", node.name, reason)
            return 0
        except Exception as error:
            failure = log_failure(node.name, error)
            try:
                self._report(state=NodeState.FAILED, error=failure)
            except (_Ended, StoreError) as reason:
                log.info("the failure could not be written to the node's row: %s", reason)
            return 1
        finally:
            self._take_down(member)
        return 0

    def _claim(self) -> tuple[Node, PoolSpec, str | None, bool] | None:
        """Claim the node's row: record this process as the node's supervisor, and set the node's state to starting."""
        with transaction(self._store, JournalStep.CLAIM) as session:
            node = session.get(Node, self._id, with_for_update=True)
            if node is None or node.epoch != self._epoch or node.supervisor or node.state is not NodeState.PLANNED:
                return None
            pool = session.get_one(Pool, node.pool)
            head = session.get(Node, node.head_id) if node.head_id else None
            if not node.is_head and (head is None or head.endpoint is None):
                return None
            node.supervisor = self._me.to_json()
            node.state = NodeState.STARTING
            addresses = head.endpoint if head else None
            gcs = addresses.get(REGISTER) or addresses["gcs"] if addresses else None
            return node, PoolSpec.model_validate(pool.spec), gcs, pool.owner is not None

    def _claim_gpus(self, node: Node, wanted: int, *, embedded: bool) -> gpus.GpuClaim:
        """Lock the node's GPUs, and hide all other GPUs from the node's processes. If too few GPUs are free, wait up to
        `GPU_PATIENCE` seconds, because another node may be about to release some.

        Raises:
            CapacityError: Too few GPUs are free.
        """
        until = time.monotonic() + timeouts.GPU_PATIENCE
        while True:
            try:
                claim = gpus.claim(wanted, node, self._folder, embedded=embedded)
                break
            except CapacityError:
                if time.monotonic() > until:
                    raise
                self._checked_row()
                self._pause()
        claim.show_only_these()
        node.gpus = len(claim.gpus)
        return claim

    def _in_turn(self, start: Callable[[], Member]) -> Member:
        """Wait until fewer than `STARTS_AT_ONCE` other nodes of this host are starting, then start the node.

        The limit is needed because Ray allows 30 s for a start, and many concurrent starts would take longer. Each
        supervisor locks one of `STARTS_AT_ONCE` files (a turn) until its node has joined the cluster. Imports take
        place before this, without a lock.
        """
        looked = -timeouts.SUPERVISOR_PERIOD
        while True:
            # This loop runs 20 times per second, but reads the row only once per second, because each query takes CPU
            # time from the nodes that are starting.
            if self._stopping or time.monotonic() - looked > timeouts.SUPERVISOR_PERIOD:
                self._checked_row()
                looked = time.monotonic()
            for turn in range(STARTS_AT_ONCE):
                with open_locked(turn_lock(turn), wait=False) as mine:
                    if mine:
                        self._checked_row()
                        return start()
            time.sleep(0.05)

    def _watch(self, member: Member) -> None:
        busy = draining = False
        reconciler_seen = time.monotonic()
        while True:
            row = self._checked_row()
            if why := member.dead():
                raise RuntimeError(why)
            if row and row.state is NodeState.DRAINING and not draining:
                draining = True
                member.drain(timeouts.DRAIN_GRACE, "the pool shrinks")
            if (now_busy := member.busy()) != busy:
                # If the store cannot be reached, `_report` fails and `busy` stays unchanged, so the next round of this
                # loop reports the new value again.
                with suppress(StoreError):
                    self._report(busy=now_busy)
                    busy = now_busy
            if time.monotonic() > reconciler_seen + timeouts.REVIVE_PERIOD:
                reconciler_seen = time.monotonic()
                # If the reconciler cannot be started because $SHOAL_HOME is full or read-only, ignore the error, so
                # that the node keeps running.
                with suppress(StoreError, OSError):
                    ensure_running()
            self._pause()

    def _checked_row(self) -> Node | None:
        """Return the node's row, or None while the store cannot be reached."""
        if self._stopping:
            raise _Ended("the supervisor received SIGTERM")
        if not self._store.exists():
            raise _Ended("the state store does not exist any more")
        sign, now = changes_seen(self._lock), time.monotonic()
        if sign != self._sign or now > self._store_seen + UNCHANGED_PERIOD:
            try:
                self._row = self._store.get(Node, self._id)
            except StoreError:
                self._sign = None
                if waited_since(self._store_seen) > timeouts.STORE_PATIENCE:
                    raise _Ended(f"the store could not be reached for {timeouts.STORE_PATIENCE:.0f} s") from None
                return None
            self._sign, self._store_seen = sign, now
        node = self._row
        if node is None or node.epoch != self._epoch:
            raise _Ended("the node's row in the database was deleted or replaced")
        if node.supervisor != self._me.to_json():
            raise _Ended("the node's row belongs to another supervisor")
        if node.state is NodeState.ENDING:
            raise _Ended(node.error or "the node's row says that the node has to end")
        # After a jump of the wall clock, the reconciler adds the jump to both `start_deadline` and `created_at`. So
        # their difference is always the time that the start may take.
        may_take = node.start_deadline - node.created_at
        if node.state is NodeState.STARTING and waited_since(self._begun) > may_take:
            advice = f": {backend.ADVICE}" if backend.sources_without_bytecode() else ""
            raise _Ended(f"the node was not ready at its start deadline{advice}")
        return node

    def _report(self, **fields: object) -> None:
        """Write the given values to the node's row in the database. Raise _Ended if the row was deleted, if it belongs
        to another supervisor, or if the node's state is `ENDING`."""
        with transaction(self._store, JournalStep.REPORT) as session:
            node = session.get(Node, self._id, with_for_update=True)
            if node is None or node.supervisor != self._me.to_json() or node.state is NodeState.ENDING:
                raise _Ended("the node's row was deleted or belongs to another supervisor, or the node has to end")
            for name, value in fields.items():
                setattr(node, name, value)
            sizes.note(session, node.pool, time.time())
        self._sign = None  # the row that was read before has old values

    def _report_until_written(self, **fields: object) -> None:
        """Write values to the node's row in the database. Try again until the database can be reached."""
        while True:
            try:
                return self._report(**fields)
            except StoreError as error:
                log.warning("%s", error)
            self._checked_row()
            self._pause()

    def _take_down(self, member: Member | None) -> None:
        if member:
            try:
                member.stop()
            except Exception:
                log.exception("the node could not be stopped cleanly; its processes are killed")
        if not processes.end_all(
            lambda: processes.of_node(self._id, [self._folder], self._me), patience=timeouts.KILL_PATIENCE
        ):
            remove_own_folder(self._folder)
            if self._gpus:
                self._gpus.release()

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True

    def _pause(self) -> None:
        until = time.monotonic() + timeouts.SUPERVISOR_PERIOD
        while not self._stopping and (left := until - time.monotonic()) > 0:
            # After a signal handler returns, Python continues the interrupted sleep. So the pause is a series of short
            # sleeps, and SIGTERM takes effect within 0.1 s.
            time.sleep(min(left, 0.1))


def main(load: Load = load_node) -> None:
    """Run the supervisor with two command line arguments: ``NODE_ID`` is the node's id, and ``EPOCH`` is how many times
    the pool had been started when the node was planned."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # Leave the caller's working directory. Otherwise its filesystem could not be unmounted while this process runs.
    os.chdir("/")
    node_id, epoch = sys.argv[1:3]
    code = Supervisor(node_id, int(epoch), load).run()
    logging.shutdown()
    # End this process without Python's normal exit, which may hang in Ray's threads. All clean-up is already done.
    os._exit(code)


if __name__ == "__main__":
    main()
