"""The steps of jobs by name: every transaction and every act by which a job changes.

A process may die before, in and after any of them; asking again, or a sweep, goes on from there. The crash tests try
them all: what changes a job and is no `JobStep` is not covered.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.state.steps import At, act, transaction

__all__ = ["At", "JobStep", "act", "transaction"]


class JobStep(StrEnum):
    """One step of a job, in the order that an attempt goes through them."""

    ASK = "ask"
    """Transaction: find the attempt that answers an order, or make a new one."""
    HAND_OVER = "hand-over"
    """Act: the submitter leaves the credentials in a file for the driver."""
    SEND = "send"
    """Act: the submitter sends the attempt to the pool's head, which starts its driver."""
    TOUCH = "touch"
    """Transaction: note that somebody asked about the attempt."""
    START = "start"
    """Transaction, the driver's: the attempt runs."""
    TAKE = "take"
    """Act, the driver's: it reads the credentials and deletes their file."""
    BEAT = "beat"
    """Transaction, the driver's, every few seconds: its sign of life."""
    NOTE_RUN = "note-run"
    """Transaction, the driver's: the MLflow run of the attempt."""
    PUBLISH = "publish"
    """Act, the driver's: it writes what the training returned."""
    LOCK = "lock"
    """Transaction: take a named lock."""
    SETTLE = "settle"
    """Transaction, under the lock: complete the record of a promotion that a killed process left."""
    INTEND = "intend"
    """Transaction, under the lock: record the promotion that is about to be made."""
    PROMOTE = "promote"
    """Act, under the lock: move the alias to the challenger."""
    CONFIRM = "confirm"
    """Transaction, under the lock: record that the alias was moved."""
    UNLOCK = "unlock"
    """Transaction: give a named lock back."""
    END = "end"
    """Transaction: the attempt has ended, with its result or the reason why it has none."""
    STOP = "stop"
    """Act: the head is asked to end the driver."""
    TIDY = "tidy"
    """Act: remove credentials that no driver took, and staged data."""
    COLLECT = "collect"
    """Transaction: note that the result was handed out."""
