"""Run XGBoost's tracker, by which the workers find each other, in a separate process.

A tracker must not run in the driver's process, for two reasons. On some errors, the tracker's C++ code calls
``std::exit(-1)``, which ends the process. In our tests, after a worker was killed, a call that waited for the tracker
or freed it raised an error or hung. One tracker process serves all runs of a gang (group of workers), so that only the
first run waits for ``import xgboost``. The process ends when the driver closes the process's stdin, or has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shoal.errors import TrainingError
from shoal.exit_status import how_ended
from shoal.training.timeouts import TRACKER_START_S


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
        source_root = str(Path(__file__).parents[3])
        inherited = os.environ.get("PYTHONPATH")
        self._process = subprocess.Popen(
            # -P: do not import from the working directory. A folder there may have the name of a library, and Python
            # would import this folder instead of the library.
            [sys.executable, "-P", "-m", "shoal.training.xgboost.tracker", host, str(num_workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source_root, inherited)))},
            # With start_new_session, Ctrl-C in the user's terminal does not reach this process. The driver handles
            # Ctrl-C, and ends its processes in the right order.
            start_new_session=True,
        )
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        # An OSError means that the pipe is broken, because the process has ended. The OSError is ignored here, because
        # the code below reports the exit code of the process.
        with contextlib.suppress(OSError):
            self._process.stdin.write("begin\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], TRACKER_START_S)[0]:
                raise TrainingError(
                    f"XGBoost's tracker process (pid {self.pid}) did not answer within {TRACKER_START_S:.0f} s"
                )
            answer = self._process.stdout.readline()
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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._closed:
            self._on_death(f"XGBoost's tracker process (pid {self.pid}) {how_ended(code)}")


def main() -> None:
    """Run the tracker process until the driver closes the process's stdin.

    For each line from stdin, print a line of JSON with the arguments with which the workers connect to a new tracker.

    The command line arguments are the host to listen on and the number of workers.
    """
    host, num_workers = sys.argv[1], int(sys.argv[2])
    # The driver expects only answers on this process's stdout. Therefore all text that libraries print to stdout is
    # redirected to stderr, and only the answers are written to the original stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # XGBoost imports these packages if they are installed, but the tracker does not need them. Without these imports
    # the process starts in 0.5 s instead of 1.5 s.
    for optional in ("sklearn", "pandas"):
        sys.modules[optional] = None  # type: ignore[assignment]
    from xgboost.core import XGBoostError
    from xgboost.tracker import RabitTracker

    # This queue keeps the tracker of the current run and the tracker of the next run, and frees older trackers. Freeing
    # an older tracker is safe, because it has ended with its run. (When a run fails, the driver kills this whole
    # process.)
    trackers: deque[RabitTracker] = deque(maxlen=2)
    try:
        while True:
            # Starting a tracker takes 0.1 s, which is 5 % of the time of a small training. Therefore the tracker of the
            # next run is started already while the workers train.
            trackers.append(RabitTracker(n_workers=num_workers, host_ip=host, sortby="task"))
            trackers[-1].start()
            if not sys.stdin.readline():
                break
            print(json.dumps(trackers[-1].worker_args()), file=answers)
    except (XGBoostError, OSError, ValueError) as exc:
        print(json.dumps({"error": str(exc).split("Stack trace")[0].strip()}), file=answers)
    # os._exit() is used, because sys.exit() would free the trackers, and freeing a tracker that still waits for workers
    # could hang.
    os._exit(0)


if __name__ == "__main__":
    main()
