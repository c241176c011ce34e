"""The process that owns one local node: ``python -m shoal.pool.supervisor NODE_ID EPOCH``.

It claims its row before it starts anything, and goes on proving the node's right to exist: when the row is gone, was
given to another, or says that the node shall end, it ends the node and itself. So even a process that was paused
between intent and act cannot leave a node that nobody owns. A store that cannot be reached is no such answer.
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
from typing import Protocol

from shoal.errors import StoreError
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.backend import node_folder
from shoal.pool.journal.steps import JournalStep, transaction
from shoal.pool.reconciler import ensure_running
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import DRAIN_GRACE, KILL_PATIENCE, REVIVE_PERIOD, STORE_PATIENCE, SUPERVISOR_PERIOD
from shoal.state import Store
from shoal.state.locks import open_locked
from shoal.state.process import ProcessId
from shoal.state.runtime import remove_own_folder, turn_lock
from shoal.state.schema import Node, NodeState, Pool

log = logging.getLogger("shoal.supervisor")

_TURNS = (os.cpu_count() or 1) + 1
"""Nodes that come up at once on this host: each keeps a core busy with its agents' imports, and pauses in between."""


class Member(Protocol):
    """What a supervisor owns: a Ray node, or in the crash tests something tiny."""

    @property
    def endpoint(self) -> dict[str, str]:
        """Where it is reached."""

    def dead(self) -> str | None:
        """Why it is of no more use, such as what of it has ended by itself."""

    def busy(self) -> bool:
        """Whether it works."""

    def drain(self, seconds: float, reason: str) -> None:
        """Give it no new work."""

    def stop(self) -> None:
        """End it."""


Start = Callable[[Node, PoolSpec, str | None, Path], Member]
"""Makes the member of a node's row: (row, pool's spec, the head's address or None, its folder)."""

Load = Callable[[], Start]
"""Imports what a start needs. Apart from it, because imports may run side by side and starts may not."""


class _Ended(Exception):
    """The node has no right to exist any more."""


class Supervisor:
    """One node's owner.

    Args:
        node_id: Its row.
        epoch: The pool's epoch it was planned in.
        load: Gives what makes the node.
    """

    def __init__(self, node_id: str, epoch: int, load: Load) -> None:
        self._id = node_id
        self._epoch = epoch
        self._load = load
        self._me = ProcessId.mine()
        self._folder = node_folder(node_id)
        self._stopping = False
        self._store_seen = self._begun = time.monotonic()

    def run(self) -> int:
        """Own the node until its end; returns the exit code."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._store = Store(migrate=False)
        claimed = self._claim()
        if claimed is None:
            log.info("node %s is not mine to start", self._id)
            return 0
        node, spec, gcs = claimed
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = str(self._folder)  # its starter may have named one in a root that has gone since
        member: Member | None = None
        try:
            member = self._bring_up(node, spec, gcs)
            self._right_to_exist()  # a node that comes up after its deadline is ended
            self._insist(state=NodeState.READY, endpoint=member.endpoint)
            log.info("%s is ready", node.name)
            self._watch(member)
        except _Ended as reason:
            log.info("%s ends: %s", node.name, reason)
            return 0
        except Exception as error:
            log.exception("%s failed", node.name)
            self._fail(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._take_down(member)
        return 0

    def _claim(self) -> tuple[Node, PoolSpec, str | None] | None:
        """Take the row, unless it is gone, another's, or no longer wanted."""
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
            return node, PoolSpec.model_validate(pool.spec), head.endpoint["gcs"] if head and head.endpoint else None

    def _bring_up(self, node: Node, spec: PoolSpec, gcs: str | None) -> Member:
        """Start the node when its turn has come: Ray gives a start 30 s, which many at once would not keep.

        The turn is held only while the node comes up to the cluster: what it needs is imported before, beside others.
        """
        start = self._load()
        looked = -SUPERVISOR_PERIOD
        while True:
            # Not at every turn: asking the store takes CPU from those who start.
            if self._stopping or time.monotonic() - looked > SUPERVISOR_PERIOD:
                self._right_to_exist()
                looked = time.monotonic()
            for turn in range(_TURNS):
                with open_locked(turn_lock(turn), wait=False) as mine:
                    if mine:
                        self._right_to_exist()
                        return start(node, spec, gcs, self._folder)
            time.sleep(0.05)

    def _watch(self, member: Member) -> None:
        busy = draining = False
        reconciler_seen = time.monotonic()
        while True:
            row = self._right_to_exist()
            if why := member.dead():
                raise RuntimeError(why)
            if row and row.state is NodeState.DRAINING and not draining:
                draining = True
                member.drain(DRAIN_GRACE, "the pool shrinks")
            if (now_busy := member.busy()) != busy:
                with suppress(StoreError):  # it hears of it at the next look
                    self._report(busy=now_busy)
                    busy = now_busy
            if time.monotonic() > reconciler_seen + REVIVE_PERIOD:
                reconciler_seen = time.monotonic()
                with suppress(StoreError, OSError):  # a home that is full or read-only for a while ends no node
                    ensure_running()
            self._pause()

    def _right_to_exist(self) -> Node | None:
        """The row, while the node may live; None while the store cannot be asked.

        Raises:
            _Ended: It may not.
        """
        if self._stopping:
            raise _Ended("asked by signal")
        if not self._store.exists():
            raise _Ended("the store is gone")
        try:
            with self._store.reading() as session:
                node = session.get(Node, self._id)
        except StoreError:
            if time.monotonic() - self._store_seen > STORE_PATIENCE:
                raise _Ended(f"the store could not be reached for {STORE_PATIENCE:.0f} s") from None
            return None
        self._store_seen = time.monotonic()
        if node is None or node.epoch != self._epoch:
            raise _Ended("its row is gone")
        if node.supervisor != self._me.to_json():
            raise _Ended("its row was given to another")
        if node.state is NodeState.ENDING:
            raise _Ended(node.error or "its row says so")
        # Both times follow the wall clock's jumps, so their difference does not change by one.
        may_take = node.start_deadline - node.created_at
        if node.state is NodeState.STARTING and time.monotonic() - self._begun > may_take:
            raise _Ended("it was not up at its deadline")
        return node

    def _report(self, **fields: object) -> None:
        """Write to the row, as long as it is this supervisor's."""
        with transaction(self._store, JournalStep.REPORT) as session:
            node = session.get(Node, self._id, with_for_update=True)
            if node is None or node.supervisor != self._me.to_json() or node.state is NodeState.ENDING:
                raise _Ended("its row was taken away")
            for name, value in fields.items():
                setattr(node, name, value)

    def _insist(self, **fields: object) -> None:
        """The same, as soon as the store can be reached: no node is given up because nobody could be told of it."""
        while True:
            try:
                return self._report(**fields)
            except StoreError as error:
                log.warning("%s", error)
            self._right_to_exist()
            self._pause()

    def _fail(self, error: str) -> None:
        try:
            self._report(state=NodeState.FAILED, error=error)
        except (_Ended, StoreError) as nobody:
            log.info("nobody to tell: %s", nobody)

    def _take_down(self, member: Member | None) -> None:
        if member:
            try:
                member.stop()
            except Exception:
                log.exception("could not be stopped in an orderly way")
        if not processes.end_all(lambda: processes.of_node(self._id, [self._folder], self._me), patience=KILL_PATIENCE):
            remove_own_folder(self._folder)

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True

    def _pause(self) -> None:
        until = time.monotonic() + SUPERVISOR_PERIOD
        while not self._stopping and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # short, because a signal does not cut a sleep short


def load_raylet() -> Start:
    """Import Ray; what it gives starts a Ray node."""
    from shoal.pool.backends.local.raylet import Raylet, RayletSpec

    def start(node: Node, spec: PoolSpec, gcs: str | None, folder: Path) -> Member:
        return Raylet(RayletSpec(node.name, folder, node.cpus, node.gpus, spec.object_store_mb * 2**20, gcs))

    return start


def main(load: Load = load_raylet) -> None:
    """Entry point: ``NODE_ID EPOCH``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir("/")  # keeps no folder of the caller's busy
    node_id, epoch = sys.argv[1:3]
    code = Supervisor(node_id, int(epoch), load).run()
    logging.shutdown()
    os._exit(code)  # Ray's threads may hang at interpreter exit; nothing is left to clean up


if __name__ == "__main__":
    main()
