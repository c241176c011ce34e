"""Run XGBoost's tracker, by which the workers find each other, in a separate process.

A tracker must not run in the driver's process, for two reasons. On some errors, the tracker's C++ code calls
``std::exit(-1)``, which ends the process. In our tests, after a worker was killed, a call that waited for the tracker
or freed it raised an error or hung. One tracker process serves all runs of a gang (group of workers), so that only the
first run waits for its start. If the driver has a template of workers, the process is forked from it, and otherwise it
has to import XGBoost. The process ends when the driver closes its requests, or has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections.abc import Callable

from shoal.errors import TrainingError
from shoal.os_processes import how_ended, start_python
from shoal.training.gang.child_processes import forked
from shoal.training.timeouts import TRACKER_START_S
from shoal.training.xgboost.tracker_process import run


class Tracker:
    """Handle with which the driver controls the process that runs XGBoost's trackers. The workers find each other with
    a tracker.

    Args:
        host: Address at which the workers can reach the tracker.
        num_workers: Number of workers of the gang.
        on_death: Function to call with an error message if the process ends before :meth:`close`; called in a separate
            thread.
    """

    def __init__(self, host: str, num_workers: int, on_death: Callable[[str], None]) -> None:
        self._host = host
        self._on_death = on_death
        self._closed = False
        requests, write_to = os.pipe()
        read_from, answers = os.pipe()
        self._requests, self._answers = os.fdopen(write_to, "w"), os.fdopen(read_from)
        try:
            # With start_new_session, Ctrl-C in the user's terminal does not reach this process. The driver handles
            # Ctrl-C, and ends its processes in the right order.
            self._process = forked(run, (host, num_workers), [requests, answers, 2]) or start_python(
                ["-m", "shoal.training.xgboost.tracker_process", host, str(num_workers)],
                stdin=requests,
                stdout=answers,
                start_new_session=True,
            )
        finally:
            os.close(requests)
            os.close(answers)
        threading.Thread(target=self._watch, name="shoal-tracker", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the tracker process."""
        return self._process.pid

    def begin(self) -> dict[str, str | int]:
        """Ask the tracker process for a new tracker. The workers of one run find each other with this tracker.

        Raises:
            TrainingError: The tracker cannot start, or the tracker process has ended or did not answer; the message
                contains the reason.
        """
        answer = ""
        # An OSError means that the pipe is broken, because the process has ended. The OSError is ignored here, because
        # the code below reports the exit code of the process.
        with contextlib.suppress(OSError):
            self._requests.write("begin\n")
            self._requests.flush()
            if not select.select([self._answers], [], [], TRACKER_START_S)[0]:
                raise TrainingError(
                    f"XGBoost's tracker process (pid {self.pid}) did not answer within {TRACKER_START_S:.0f} s"
                )
            answer = self._answers.readline()
        if not answer:
            raise TrainingError(f"XGBoost's tracker process (pid {self.pid}) {how_ended(self._process.wait())}")
        message = json.loads(answer)
        if "error" in message:
            raise TrainingError(f"XGBoost's tracker cannot start on {self._host}: {message['error']}")
        return dict(message)

    def close(self) -> None:
        """Kill the tracker process and close the pipes to it."""
        self._closed = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._closed:
            self._on_death(f"XGBoost's tracker process (pid {self.pid}) {how_ended(code)}")
