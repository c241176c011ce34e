"""Names of the journal steps. Every transaction on a pool's database rows, and every action on its processes or files,
is one step.

A process may die before, during or after any step, and the next sweep continues from there. The crash tests kill a
process at every `JournalStep`. So every change of a pool has to be part of a step, or the tests do not cover it.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.state.steps import At, act, transaction

__all__ = ["At", "JournalStep", "act", "transaction"]


class JournalStep(StrEnum):
    """One step of changing a pool. The members are in the order in which the steps of an operation happen."""

    REQUEST = "request"
    """Transaction: write a request (demand, lease, limits, `down`) and its operation."""
    WITHDRAW = "withdraw"
    """Transaction: roll back an operation for which its caller no longer waits."""
    INTEND = "intend"
    """Transaction: write the observed state of the nodes, the ended operations, and which nodes to start and end."""
    START = "start"
    """Action: start the planned nodes. For each local node, spawn a supervisor process."""
    CLAIM = "claim"
    """Transaction of the supervisor: write its identity to the node's row, and set the node's state to starting."""
    REPORT = "report"
    """Transaction of the supervisor: write that the node is ready, busy, idle, or has failed."""
    END = "end"
    """Action: end nodes, and search for their processes until none is found."""
    CONFIRM = "confirm"
    """Transaction: delete the rows of nodes that have ended."""
    TIDY = "tidy"
    """Transaction with an action inside: remove the token of a pool that is down, or a whole embedded pool."""
    CLEAR = "clear"
    """Action of a sweep (clean-up of a host): end a node that has no row in the database."""
