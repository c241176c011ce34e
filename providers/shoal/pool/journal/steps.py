"""The journal's steps: every transaction and every act by which a pool changes, each with a name.

A process may die before, in and after any of them, and whoever sweeps next goes on from there. The crash tests hook in
here and try them all: what changes a pool and is no `JournalStep` is not covered.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.state.steps import At, act, transaction

__all__ = ["At", "JournalStep", "act", "transaction"]


class JournalStep(StrEnum):
    """One step of changing a pool, in the order that an operation goes through them."""

    REQUEST = "request"
    """Transaction: what somebody wants (demand, lease, limits, `down`) and the operation that carries it out."""
    WITHDRAW = "withdraw"
    """Transaction: an operation whose caller gave it up is rolled back."""
    INTEND = "intend"
    """Transaction: what was seen of the nodes, what becomes of the operations, which nodes shall start and end."""
    START = "start"
    """Act: nodes that are planned are started (local ones: a supervisor is spawned for each)."""
    CLAIM = "claim"
    """Transaction, the supervisor's: the node is its own, and being started."""
    REPORT = "report"
    """Transaction, the supervisor's: the node is ready, works, or has failed."""
    END = "end"
    """Act: what there is of nodes that are to end is ended, and looked for until nothing is found."""
    CONFIRM = "confirm"
    """Transaction: nodes that were seen to end are forgotten."""
    TIDY = "tidy"
    """Transaction, with the act in it: a pool that is down loses its token, an embedded one all trace."""
    CLEAR = "clear"
    """Act, the sweep's: a node that is there and has no row is ended."""
