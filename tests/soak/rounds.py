"""One round: an operation in a process of its own, a SIGKILL at a random instant of it, sweeps, and a hard look."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.jobs import sweep
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool, list_pools
from shoal.state import Store, home
from shoal.state.schema import Demand, NodeState
from tests.soak.actor import HOLDER
from tests.support.node_leftovers import Watch
from tests.support.pool_processes import node_processes, node_rows
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
MAX_NODES = 4
VICTIMS = ("the actor", "a supervisor", "the reconciler", "a raylet", "the GCS")
ACTOR_SHARE = 0.4
"""The actor dies in so many of the rounds, something else in the others."""

SPANS = {
    "up": 8.0, "grow": 8.0, "shrink": 3.0, "lease": 8.0, "release": 3.0,
    "rollback": 6.0, "sweep": 3.0, "down": 3.0, "down, up": 10.0,
}  # fmt: skip
"""Operation -> seconds from its beginning within which the kill falls: about as long as it takes undisturbed."""

PATIENCE = 300.0
"""After so long a round has failed: it has to be a lot more than the cooldown between failed starts."""


@dataclass(frozen=True)
class Claims:
    """What is wanted of the pool: its base demand and the soak's lease, None where there is none."""

    base: int | None = None
    lease: int | None = None

    @property
    def target(self) -> int:
        return max((size for size in (self.base, self.lease) if size is not None), default=0)


@dataclass(frozen=True)
class Case:
    """What a round does: drawn before it begins, from the seed and what the pool is wanted to be.

    Of the victims the first dies that is there at the instant.
    """

    operation: str
    size: int
    deadline: float
    victims: tuple[str, ...]
    after: float

    @classmethod
    def draw(cls, dice: random.Random, now: Claims) -> Case:
        names = ["up", "lease"] if now.target == 0 else ["lease", "rollback", "sweep", "down", "down, up"]
        if 0 < now.target < MAX_NODES:
            names += ["grow"] * 2
        if (now.base or 0) > 1:
            names += ["shrink"] * 2
        if now.lease is not None:
            names += ["release"] * 2
        operation = dice.choice(names)
        size = dice.randint(2, MAX_NODES)
        if operation in ("grow", "rollback"):
            size = dice.randint(min(now.target + 1, MAX_NODES), MAX_NODES)
        elif operation == "shrink":
            size = dice.randint(1, (now.base or 2) - 1)
        victims = dice.sample(VICTIMS[1:], k=len(VICTIMS) - 1)
        victims.insert(0 if dice.random() < ACTOR_SHARE else len(victims), VICTIMS[0])
        return cls(operation, size, dice.uniform(0.5, 3.0), tuple(victims), dice.uniform(0.0, SPANS[operation]))

    def wanted_after(self, before: Claims) -> Claims:
        """What is wanted where the operation succeeds."""
        match self.operation:
            case "up":
                return Claims(before.base or 1, before.lease)
            case "grow" | "shrink" | "rollback":
                return Claims(self.size, before.lease)
            case "lease":
                return Claims(before.base, self.size)
            case "release":
                return Claims(before.base, None)
            case "down":
                return Claims()
            case "down, up":
                return Claims(1)
            case _:
                return before

    def may_end_as(self, before: Claims) -> set[Claims]:
        """All that may be wanted afterwards, whoever died when: what was, what was to be, or what lies between."""
        ends = {before, self.wanted_after(before)}
        if self.operation in ("up", "down, up"):
            ends.add(Claims())
        return ends

    def __str__(self) -> str:
        how = {"grow": f" to {self.size}", "shrink": f" to {self.size}", "lease": f" {self.size}",
               "rollback": f" from {self.size} after {self.deadline:.1f} s"}  # fmt: skip
        return self.operation + how.get(self.operation, "")


@dataclass(frozen=True)
class Outcome:
    """How a round ended."""

    case: Case
    victim: str
    killed: str
    actor: str
    nodes: int
    seconds: float
    problem: str | None


def claims() -> Claims:
    """What is wanted of the pool now."""
    if not list_pools():
        return Claims()
    status = ComputePool("soak").describe()
    with Store().reading() as session:
        demand = session.get(Demand, "soak")
    lease = next((lease.size for lease in status.leases if lease.holder == HOLDER), None)
    return Claims(demand.size if demand else None, lease)


class Actor:
    """The operation, in a process of its own that has begun it when this returns."""

    def __init__(self, operation: str, size: int, deadline: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.actor", operation, str(size), str(deadline)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._said: list[str] = []
        self._go = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        self._go.wait()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._said.append(line.rstrip())
            self._go.set()
        self._go.set()

    def end(self) -> str:
        """Wait for its end; how it was.

        Raises:
            AssertionError: With a traceback, or never.
        """
        code = self.process.wait(timeout=PATIENCE)
        if code == -signal.SIGKILL:
            return "killed"
        said = [line for line in self._said if line != "go"]
        assert code == 0, "the actor: " + " / ".join(said[-3:])
        return said[-1] if said else "?"


def run(case: Case, dice: random.Random, watch: Watch) -> Outcome:
    """Carry a round out; never raises for what the pool does wrong, which is the outcome's problem."""
    before = claims()
    if case.operation == "sweep":  # so that it has something to sweep
        _kill(dice, ["a supervisor"], None)
    actor = Actor(case.operation, case.size, case.deadline)
    killing = time.monotonic() + case.after
    while (left := killing - time.monotonic()) > 0:
        watch.look()
        time.sleep(min(left, 0.2))  # the instant of the kill is drawn, nothing is waited for
    watch.look()
    victim = _kill(dice, case.victims, actor)
    began = time.monotonic()
    ended, problem = "", None
    try:
        ended = actor.end()
        wait_until(lambda: not _unsettled(watch, victim), "the pool at its demand", seconds=PATIENCE)
        now = claims()
        fine = (
            {case.wanted_after(before)} if ended == "done" and case.operation != "rollback" else case.may_end_as(before)
        )
        assert now in fine, f"{now} is wanted after {before}; it can be {fine}"
    except (AssertionError, subprocess.TimeoutExpired) as error:
        actor.process.kill()
        problem = "; ".join([str(error), *_unsettled(watch, victim)])
    watch.forget_ended()
    kind, killed = (victim.kind, victim.name) if victim else ("nobody", "nobody: the pool was down")
    return Outcome(case, kind, killed, ended, len(node_rows()), time.monotonic() - began, problem)


def _unsettled(watch: Watch, victim: _Victim | None) -> list[str]:
    """Sweep; then what is still missing or too much."""
    sweep(Store())
    watch.look()
    if not list_pools():
        return watch.left_over()
    status, nodes = ComputePool("soak").describe(), node_rows()
    ready = sum(node.state is NodeState.READY for node in nodes)
    said = []
    if victim and victim.node_id in {node.id for node in nodes}:  # its supervisor looks after it once a second
        said.append("the node of the killed one still has its row")
    if not ready == len(nodes) == len(status.active) == status.target:
        said.append(f"{ready} of {len(nodes)} nodes are ready, {status.target} wanted")
    if status.state != ("up" if status.target else "down"):
        said.append(f"it is {status.state}")
    return [*said, *watch.left_over()]


@dataclass(frozen=True)
class _Victim:
    kind: str
    name: str
    process: ProcessId
    node_id: str | None = None


def _kill(dice: random.Random, kinds: Sequence[str], actor: Actor | None) -> _Victim | None:
    """SIGKILL to one of the first kind that there is; who it was."""
    for kind in kinds:
        if there := sorted(_candidates(kind, actor), key=lambda victim: victim.name):
            victim = dice.choice(there)
            victim.process.signal(signal.SIGKILL)
            return victim
    return None


def _candidates(kind: str, actor: Actor | None) -> Iterator[_Victim]:
    if kind == "the actor":
        if actor and (process := ProcessId.of(actor.process.pid)):
            yield _Victim(kind, kind, process)
    elif kind == "the reconciler":
        for process in reconcilers():
            yield _Victim(kind, kind, process)
    elif kind == "a supervisor":
        for node in node_rows():
            if node.supervisor and (process := ProcessId.from_json(node.supervisor)).alive():
                yield _Victim(kind, f"the supervisor of {node.name}", process, node.id)
    else:
        program = "raylet" if kind == "a raylet" else "gcs_server"
        for node in node_rows():
            for process in node_processes(node):
                if _program(process.pid) == program:
                    yield _Victim(kind, f"{program} of {node.name}", process, node.id)


def reconcilers() -> Iterator[ProcessId]:
    """This home's, of which there is one at most."""
    mine = f"SHOAL_HOME={home()}".encode()
    for name in os.listdir("/proc"):
        try:
            if (
                name.isdigit()
                and b"shoal.reconciler" in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                and mine in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                and (process := ProcessId.of(int(name)))
            ):
                yield process
        except OSError:  # ended meanwhile
            continue


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
