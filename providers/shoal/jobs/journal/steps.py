"""Steps of a job by name: every transaction and every other action that changes a job.

A process may die before, during and after each step; the next submission or sweep goes on from there. The crash tests
cover all members of `JobStep`, so every new transaction or action on a job needs a member.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.state.steps import At, act, transaction

__all__ = ["At", "JobStep", "act", "transaction"]


class JobStep(StrEnum):
    """Steps of a job, in the order of an attempt's life."""

    ASK = "ask"
    """Transaction: find the attempt that fulfils an order, or add a new one."""
    HAND_OVER = "hand-over"
    """Action: the submitter writes the credentials into a file for the driver."""
    ADMIT = "admit"
    """Transaction: put the attempt into its pool's queue, and give it room if there is some; or let it wait again."""
    SEND = "send"
    """Action: the submitter sends the attempt to the pool's head, which starts the driver."""
    TOUCH = "touch"
    """Transaction: update `last_polled_at` of the attempt."""
    START = "start"
    """Transaction: the driver records that the attempt runs."""
    TAKE = "take"
    """Action: the driver reads the credentials and deletes their file."""
    BEAT = "beat"
    """Transaction: the driver records its heartbeat, every few seconds."""
    NOTE_RUN = "note-run"
    """Transaction: the driver records the MLflow run of the attempt."""
    PUBLISH = "publish"
    """Action: the driver writes the files of the training's result."""
    LOCK = "lock"
    """Transaction: take a named lock."""
    SETTLE = "settle"
    """Transaction, under the lock: complete the record of a promotion that a killed process began."""
    INTEND = "intend"
    """Transaction, under the lock: record a promotion before the alias is moved."""
    PROMOTE = "promote"
    """Action, under the lock: move the alias to the challenger."""
    CONFIRM = "confirm"
    """Transaction, under the lock: record that the alias was moved."""
    UNLOCK = "unlock"
    """Transaction: release a named lock."""
    END = "end"
    """Transaction: record the end of the attempt, with its result or error."""
    STOP = "stop"
    """Action: ask the head to stop the driver."""
    TIDY = "tidy"
    """Action: remove staged data, and credentials that no driver has read."""
    COLLECT = "collect"
    """Transaction: record that the result was collected."""
