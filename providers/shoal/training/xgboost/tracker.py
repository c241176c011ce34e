"""XGBoost's tracker, in a process of its own.

On some errors the tracker's C++ side calls ``std::exit(-1)``, and after a worker was killed it can neither be waited
for nor freed (both raised or hung here): it must not live in a process that is to live on. The process serves the runs
of one gang, one after the other, so that only the first waits for ``import xgboost``; it ends when its parent is
gone, which it knows by the end of its stdin.
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

# `import xgboost` takes 1.4 s, 3 s from a cold disk, more where many processes start at once; a process that has not
# answered by now never will.
_START_SECONDS = 60.0


class Tracker:
    """The parent's handle on a tracker process.

    Args:
        host: Address that the workers reach it at.
        num_workers: Number of workers of the gang that it serves.
        on_death: Called, from a thread, with what happened if the process ends before :meth:`close`.
    """

    def __init__(self, host: str, num_workers: int, on_death: Callable[[str], None]) -> None:
        self._host = host
        self._on_death = on_death
        self._closed = False
        source_root = str(Path(__file__).parents[3])
        inherited = os.environ.get("PYTHONPATH")
        self._process = subprocess.Popen(
            # -P: the caller's working directory may hold a folder that is called like a library.
            [sys.executable, "-P", "-m", "shoal.training.xgboost.tracker", host, str(num_workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source_root, inherited)))},
            # Ctrl-C is for the driver, which then ends us in its own order.
            start_new_session=True,
        )
        threading.Thread(target=self._watch, name="shoal-tracker", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the tracker."""
        return self._process.pid

    def begin(self) -> dict[str, str | int]:
        """Takes a tracker for one run; waits for the process to have started.

        Returns:
            What the workers pass to ``xgboost.collective.init``.

        Raises:
            TrainingError: If the process cannot do it, with its reason.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        # A broken pipe: the process ended, and no answer follows.
        with contextlib.suppress(OSError):
            self._process.stdin.write("begin\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], _START_SECONDS)[0]:
                raise TrainingError(
                    f"XGBoost's tracker process (pid {self.pid}) has not answered for {_START_SECONDS:.0f} s"
                )
            answer = self._process.stdout.readline()
        if not answer:
            raise TrainingError(f"XGBoost's tracker process (pid {self.pid}) ended: {_exit(self._process.wait())}")
        message = json.loads(answer)
        if "error" in message:
            raise TrainingError(f"XGBoost's tracker cannot start on {self._host}: {message['error']}")
        return dict(message)

    def close(self) -> None:
        """Ends the process."""
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
            self._on_death(f"XGBoost's tracker process (pid {self.pid}) ended: {_exit(code)}")


def _exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def main() -> None:
    """Answers each line of stdin with a tracker's arguments, as JSON, until stdin ends.

    Its command line is the host to listen on and the number of workers.
    """
    host, num_workers = sys.argv[1], int(sys.argv[2])
    # The answers have the pipe to themselves; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # XGBoost imports these if they are there and the tracker uses neither: 0.5 s to start without them, 1.5 s with.
    for optional in ("sklearn", "pandas"):
        sys.modules[optional] = None  # type: ignore[assignment]
    from xgboost.core import XGBoostError
    from xgboost.tracker import RabitTracker

    # The one in use and the next. Dropping the one before is safe: it ended with its run, and a run that failed takes
    # this process with it.
    trackers: deque[RabitTracker] = deque(maxlen=2)
    try:
        while True:
            # Starting one takes 0.1 s, a twentieth of a small fit: the next is made while the workers train.
            trackers.append(RabitTracker(n_workers=num_workers, host_ip=host, sortby="task"))
            trackers[-1].start()
            if not sys.stdin.readline():
                break
            print(json.dumps(trackers[-1].worker_args()), file=answers)
    except (XGBoostError, OSError, ValueError) as exc:
        print(json.dumps({"error": str(exc).split("Stack trace")[0].strip()}), file=answers)
    # Not sys.exit: a tracker that still waits for workers can be neither joined nor freed.
    os._exit(0)


if __name__ == "__main__":
    main()
