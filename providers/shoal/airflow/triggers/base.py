"""Base class of shoal's triggers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from inspect import signature
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from shoal.airflow.triggers.poller import Poller, Update, Wait, poller
from shoal.errors import StoreUnreachableError

_DEFERRED = "deferred"

_LINES_AT_ONCE = 50
"""Number of lines that are written to the task's log before the event loop serves the other triggers."""

_STORE_RETRY_S = 5.0
"""Seconds between two tries to open a store that does not answer."""


class WaitTrigger(BaseTrigger):
    """Base class of triggers that wait for a change in shoal's store, at most until a deadline.

    The trigger fires one event, a dict with ``timed_out``. The task then continues in a worker, which reads the result
    from the store. If the triggerer is killed, another triggerer continues the wait with the same deadline.

    :param poll_interval: Seconds between two checks of the store.
    :param deadline: Time at which the wait ends in any case, in seconds since the epoch. None: no deadline.
    """

    def __init__(self, *, poll_interval: float, deadline: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.poll_interval = poll_interval
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the path of the class and the arguments of the constructor, from which Airflow creates the trigger.

        The trigger must have each argument in an attribute of the same name.
        """
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            name: getattr(self, name) for name in signature(kind).parameters
        }

    @abstractmethod
    def new_wait(self) -> Wait:
        """Create the `Wait` object through which the poller of this process sends updates to this trigger."""

    @abstractmethod
    async def end(self) -> None:
        """Cancel the job or the request for nodes that the task waits for, because a user has ended the task."""

    def event(self, wait: Any, *, timed_out: bool) -> dict[str, Any]:
        """Return the payload of the event that the trigger fires.

        :param wait: The wait, as `new_wait` has returned it.
        :param timed_out: Whether the deadline has passed.
        """
        return {"timed_out": timed_out}

    def record_logged(self, wait: Any, update: Update) -> None:
        """Record that the lines of an update were written to the task's log.

        :param wait: The wait, as `new_wait` has returned it.
        :param update: The update.
        """

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and fire an event when the wait is over or the deadline has passed."""
        polled = await _poller()
        wait = self.new_wait()
        polled.add(wait)
        timed_out = False
        try:
            is_over = False
            while not is_over:
                update = await wait.update(self.deadline)
                for number, line in enumerate(update.lines, 1):
                    self.log.info("%s", line)
                    if number % _LINES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                self.record_logged(wait, update)
                is_over = update.is_over
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError:
            # Airflow before 3.3 does not call `on_kill`, but only cancels `run`. So `on_kill` is called here.
            if not hasattr(BaseTrigger, "on_kill"):
                await self.on_kill()
            raise
        finally:
            polled.remove(wait)
        yield TriggerEvent(self.event(wait, timed_out=timed_out))  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancel the job or the request for nodes that the task waits for. Do not cancel if the task is still deferred:
        another triggerer then continues the wait.

        Airflow calls this method if a user marks or clears the task. Airflow 3.3.2 also calls this method if another
        triggerer has taken the trigger over, because this triggerer did not answer for some time. The task is still
        deferred when another triggerer takes the trigger over.
        """
        # Airflow cancels `on_kill` after 30 s. `asyncio.shield` lets `_end_unless_deferred` go on nevertheless.
        self._ending = asyncio.ensure_future(self._end_unless_deferred())
        await asyncio.shield(self._ending)

    async def _end_unless_deferred(self) -> None:
        try:
            # Airflow 3.2.0 needs the event loop of this thread to ask for the task's state, and finds the loop only if
            # the call is made through `sync_to_async`.
            state = await sync_to_async(self._task_state)()
        # If Airflow does not answer, the job is not cancelled here. A job that no task waits for ends by itself after
        # the time `orphan_after`.
        except Exception:
            self.log.warning("Airflow did not report the task's state, so nothing is cancelled", exc_info=True)
            return
        if state == _DEFERRED:
            self.log.info("the task is still deferred: another triggerer goes on with the wait")
            return
        await self.end()

    def _task_state(self) -> str | None:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        ti = self.task_instance
        assert ti is not None
        states = RuntimeTaskInstance.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
        ).get(ti.run_id, {})
        state = states.get(ti.task_id if ti.map_index < 0 else f"{ti.task_id}_{ti.map_index}")
        return None if state is None else str(getattr(state, "value", state))


async def _poller() -> Poller:
    """Return the poller that all waits of this process share. If the store cannot be reached, wait until it can be
    reached."""
    while True:
        try:
            return await asyncio.to_thread(poller)
        except StoreUnreachableError:
            await asyncio.sleep(_STORE_RETRY_S)
