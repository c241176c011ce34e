"""Decide which waiting jobs of a pool start next, and describe their places in the queue.

The functions only compute, and do not read or write the store.

A pool runs as many jobs at a time as it has room for (`shoal.jobs.capacity`). The first waiting job always starts if no
other job runs, even if the job needs more than the pool has. No job overtakes the first waiting job, so that small jobs
cannot keep a large one waiting for ever.

Jobs with higher priority come first. Among equal priorities, the holder (the run that submitted the job) with the
fewest running jobs comes first, and among the jobs of one holder the oldest job.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from shoal.jobs.capacity import Gang, Room, total_size


@dataclass(frozen=True)
class Entry:
    """One attempt of a job that runs or waits on a pool, with the fields that decide when the attempt starts.

    Attributes:
        job_id: Id of the job.
        attempt: Number of the attempt.
        holder: Name of the run that submitted the job.
        priority: Priority of the job.
        queued_at: Time when the attempt joined the queue.
        waits: Whether the attempt waits. False: its driver runs or is about to run.
        gang: The workers that the job asks for.
    """

    job_id: str
    attempt: int
    holder: str
    priority: int
    queued_at: float
    waits: bool
    gang: Gang

    @property
    def key(self) -> tuple[str, int]:
        """Return the id of the job and the number of the attempt, which together identify this entry."""
        return self.job_id, self.attempt


@dataclass(frozen=True)
class Place:
    """Position of a waiting attempt in its pool's queue, and the numbers of attempts that wait and run on the pool.

    Attributes:
        position: Position of the attempt in the queue, 1 for the attempt that starts next.
        waiting: Number of attempts that wait on the pool.
        running: Number of attempts that run on the pool.
    """

    position: int
    waiting: int
    running: int

    def __str__(self) -> str:
        run = "1 job runs" if self.running == 1 else f"{self.running} jobs run"
        return f"position {self.position} of {self.waiting} in the queue, {run}"


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the waiting attempts of a pool in the order in which they start, the highest priority first."""
    entries = list(entries)
    running = Counter(entry.holder for entry in entries if not entry.waits)
    waiting = sorted((entry for entry in entries if entry.waits), key=lambda entry: -entry.priority)
    ordered: list[Entry] = []
    for _, equals in groupby(waiting, key=lambda entry: entry.priority):
        ordered += _in_turns(equals, running)
    return ordered


def next_up(entries: Iterable[Entry], room: Room) -> list[Entry]:
    """Return the waiting attempts for which the pool has room now, in the order in which they start."""
    entries = list(entries)
    total = total_size(room.nodes)
    claims = [entry.gang.claim(room.nodes) for entry in entries if not entry.waits]
    chosen: list[Entry] = []
    for entry in in_order(entries):
        if room.drivers is not None and len(claims) >= max(1, room.drivers):
            break
        claims.append(entry.gang.claim(room.nodes))
        taken = total_size(claims)
        if len(claims) > 1 and (taken.cpus > total.cpus or taken.gpus > total.gpus):
            break
        chosen.append(entry)
    return chosen


def _in_turns(equals: Iterable[Entry], running: Counter[str]) -> Iterable[Entry]:
    """Yield waiting attempts of equal priority in the order in which they start. Their submitters, such as DAG runs,
    take turns.

    Each time, the next attempt is the oldest one of the holder with the fewest running jobs.
    """
    lines: dict[str, list[Entry]] = {}
    for entry in sorted(equals, key=lambda entry: (entry.queued_at, entry.key), reverse=True):
        # Each list begins with the newest attempt, so that `list.pop` takes the oldest attempt.
        lines.setdefault(entry.holder, []).append(entry)

    def turn(holder: str) -> tuple[int, float, tuple[str, int], str]:
        first = lines[holder][-1]
        return running[holder], first.queued_at, first.key, holder

    turns = [turn(holder) for holder in lines]
    heapq.heapify(turns)
    while turns:
        *_, holder = heapq.heappop(turns)
        yield lines[holder].pop()
        running[holder] += 1
        if lines[holder]:
            heapq.heappush(turns, turn(holder))
