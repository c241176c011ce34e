"""Decide from the facts about an unfinished attempt what to do with it. This module reads and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from shoal.jobs import timeouts
from shoal.jobs.journal.attempts import End
from shoal.jobs.journal.stages import is_waiting
from shoal.os_processes import how_ended
from shoal.pool.backends.ray_http import RayJob, last_line
from shoal.state.schema import Job, JobState

_SIGKILLED = (-9, 137)
"""Exit codes of a process that SIGKILL ended: -9 as Python reports it, 137 as a shell reports it."""


class Silence(Enum):
    """Reason why the pool's head gave no answer about a job. For some of the reasons, the job may still run."""

    POOL_GONE = auto()
    """The pool is down or does not exist: none of its jobs runs any more."""
    HEAD_REPLACED = auto()
    """The pool has a new head, which does not know the jobs that were submitted to the old one."""
    NO_ANSWER = auto()
    """The head does not answer, or is being replaced; the head may answer later."""
    NO_CONNECTION = auto()
    """There is no network connection to the machine of the head, or a server between says that the head does not
    answer: the head and its jobs may still run, or be paused."""
    ELSEWHERE = auto()
    """The pool is bound to another machine, and only that machine can ask its head."""


PATIENCE_S = {Silence.NO_ANSWER: timeouts.HEAD_PATIENCE_S, Silence.NO_CONNECTION: timeouts.FAR_HEAD_PATIENCE_S}
"""Seconds without an answer of the head and a heartbeat after which a job counts as lost."""


@dataclass(frozen=True)
class View:
    """The head's answer about an attempt, or the reason why there is no answer.

    Attributes:
        ray_job: State of the attempt as Ray reports it; None if Ray does not know the attempt or there is no answer.
        silence: Reason why there is no answer; None if the head has answered.
    """

    ray_job: RayJob | None = None
    silence: Silence | None = None


@dataclass(frozen=True)
class Facts:
    """What a process knows of an unfinished attempt at one moment.

    Attributes:
        job: The attempt's row.
        view: The head's answer. For an attempt in the queue, only whether the pool has a head.
        now: Present time in seconds since the epoch.
        silent_for: Seconds for which neither the head has answered nor the driver has sent a heartbeat.
        unpolled_for: Seconds since a process last polled the job. None: not known, because another host has polled it.
        waited_too_long: Error of an attempt that has waited in the queue for longer than its timeout.
        submitter_is_gone: Whether the process that has to send the attempt to the head seems to be dead.
        last_words: Function that returns the last line of the attempt's log.
    """

    job: Job
    view: View
    now: float
    silent_for: float = 0.0
    unpolled_for: float | None = None
    waited_too_long: str | None = None
    submitter_is_gone: bool = False
    last_words: Callable[[], str] = str


class Step(Enum):
    """What to do with an attempt that need not end."""

    WAIT = auto()
    SEND = auto()
    """Send the attempt to the pool's head, because the process that had to do it has not."""
    ADMIT = auto()
    """Let the attempt leave the queue if the pool has room for it, and send it."""


@dataclass(frozen=True)
class Cancel:
    """Cancel the attempt and stop its driver, for the given reason."""

    reason: str


def for_waiter(facts: Facts) -> Step | End:
    """Decide for a process that waits for the attempt, which is not in the queue."""
    if (lost := _lost(facts)) is not None:
        return lost
    sent_at = facts.job.admitted_at or facts.job.created_at
    return Step.SEND if _is_unsent(facts) and facts.now - sent_at > timeouts.SUBMISSION_GRACE_S else Step.WAIT


def for_host(facts: Facts) -> Step | End | Cancel:
    """Decide for the clean-up of a host. It polls no job, so a job with `orphan_after` still ends if no other process
    polls it."""
    job = facts.job
    if is_waiting(job):
        return in_queue(facts)
    if (lost := _lost(facts)) is not None:
        return lost
    is_unsent = _is_unsent(facts)
    if is_unsent and job.admitted_at is None and facts.submitter_is_gone:
        pid = job.submitter["pid"]
        why = f"the submitter (pid {pid}) died before it sent the job to the pool's head: submit the job again"
        return End(JobState.FAILED, why)
    if _is_orphan(facts, timeouts.ORPHAN_GRACE_S):
        return Cancel("no process polled the job for longer than orphan_after, and the driver did not end the job")
    long_ago = job.admitted_at is not None and facts.now - job.admitted_at > timeouts.FAR_SUBMISSION_GRACE_S
    return Step.SEND if is_unsent and (long_ago or facts.submitter_is_gone) else Step.WAIT


def in_queue(facts: Facts) -> Step | End:
    """Decide for an attempt that waits in its pool's queue."""
    job = facts.job
    if _is_orphan(facts, 0.0):
        why = f"no process has polled the job for orphan_after={job.orphan_after:g} s while it waited in the queue"
        return End(JobState.CANCELLED, why)
    if facts.waited_too_long:
        return End(JobState.FAILED, facts.waited_too_long)
    if facts.view.silence is Silence.POOL_GONE:
        return End(JobState.FAILED, f'pool "{job.pool}" went down while the job was waiting')
    return Step.ADMIT if facts.view.silence is None else Step.WAIT


def _is_orphan(facts: Facts, grace_s: float) -> bool:
    """Return whether no process has polled the attempt for more than `orphan_after` plus `grace_s` seconds."""
    limit = facts.job.orphan_after
    return limit is not None and facts.unpolled_for is not None and facts.unpolled_for > limit + grace_s


def _is_unsent(facts: Facts) -> bool:
    """Return whether the head does not know the pending attempt: its submitter has died, or has not sent it yet."""
    return facts.view == View() and facts.job.state is JobState.PENDING


def _lost(facts: Facts) -> End | None:
    """Return the end of an attempt that has ended although its driver has not recorded the end; None if that is not
    certain."""
    job = facts.job
    match facts.view:
        case View(silence=Silence.POOL_GONE):
            return End(JobState.FAILED, f'pool "{job.pool}" went down while the job was {job.state.value}')
        case View(silence=Silence.HEAD_REPLACED):
            return End(JobState.FAILED, f'pool "{job.pool}" got a new head while the job was {job.state.value}')
        case View(silence=Silence.NO_ANSWER | Silence.NO_CONNECTION as silence):
            if facts.silent_for < PATIENCE_S[silence]:
                return None
            return End(
                JobState.FAILED,
                f'the head of pool "{job.pool}" has not answered for {PATIENCE_S[silence]:.0f} s: check the pool with '
                "`shoal pool describe`",
            )
        case View(silence=None, ray_job=None):
            if job.state is JobState.PENDING:
                return None
            return End(JobState.FAILED, f'the head of pool "{job.pool}" does not know the job any more')
        case View(ray_job=RayJob(status="STOPPED")):
            return End(JobState.CANCELLED, "the job was stopped through the head's Job API")
        case View(ray_job=RayJob(ended=True, exit_code=code, message=message, why_ended=why)):
            if code is None:
                return End(JobState.FAILED, f"the driver could not be started: {last_line(message or '')}")
            if code in _SIGKILLED:
                why = f": {why}" if why else ", by a person or because its host ran out of memory"
                return End(JobState.FAILED, f"the driver was killed by SIGKILL{why}")
            words = facts.last_words()
            return End(JobState.FAILED, f"the driver {how_ended(code)}; its log ends with: {words}")
    return None
