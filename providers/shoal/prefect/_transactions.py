"""Tie the promotion of a model to the Prefect transaction around its task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context

from prefect.transactions import BaseTransaction, get_transaction


class Enclosing:
    """The transactions around the current task run: blocks of ``transaction()``, and those of tasks that call the task.

    If a try of a task fails, Prefect rolls back the transactions around the task for good, also if a retry succeeds. A
    try that begins after that is not part of these transactions.

    Attributes:
        is_open: Whether the task run is part of a transaction.
        is_rolled_back: Whether Prefect has rolled back a transaction before this try began.
    """

    def __init__(self) -> None:
        self._own = get_transaction()
        self._is_committed = False
        around = list(self._around())
        self.is_rolled_back = any(each.is_rolled_back() for each in around)
        self.is_open = bool(around) and not any(map(_has_ended, around))

    def finish(self, commit: Callable[[], object], roll_back: Callable[[], object]) -> None:
        """Call `commit` or `roll_back` when the transaction ends in this way. Call the function at once if the
        transaction has ended since the try began."""
        assert self._own is not None
        ended = next(filter(_has_ended, self._around()), None)
        if ended is not None:
            roll_back() if ended.is_rolled_back() else commit()
            return
        # The functions run after the task has ended. In its context, they log to the log of the task run, and their
        # events name it.
        context = copy_context()

        def on_commit(_: BaseTransaction) -> None:
            context.run(commit)
            self._is_committed = True

        def withdraw_promotion(_: BaseTransaction) -> None:
            if not self._is_committed:  # after its commit, Prefect rolls back a task whose result cannot be stored
                context.run(roll_back)

        self._own.on_commit_hooks.append(on_commit)
        self._own.on_rollback_hooks.append(withdraw_promotion)

    def _around(self) -> Iterator[BaseTransaction]:
        """Yield the transactions around that of the task run, the innermost first, up to the first that has ended."""
        found = self._own
        while found is not None and (found := found.get_parent()) is not None and found is not self._own:
            yield found
            if _has_ended(found):
                return


def _has_ended(transaction: BaseTransaction) -> bool:
    return transaction.is_committed() or transaction.is_rolled_back()
