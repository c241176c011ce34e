"""Run XGBoost's trackers for the workers of a gang: the program of the process that `shoal.training.xgboost.tracker`
starts with the host to listen on and the number of workers as arguments."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from typing import NoReturn

from shoal.training.host.own_process import print_to


def run(requests: int, answers: int, errors: int, host: str, num_workers: int) -> NoReturn:
    """Run the trackers of a gang in this process until the driver closes the requests.

    For each line of the requests, write a line of JSON with the arguments with which the workers connect to a new
    tracker.

    Args:
        requests: Descriptor of the requests.
        answers: Descriptor of the answers.
        errors: Descriptor to which texts of libraries are printed.
        host: Address to listen on.
        num_workers: Number of workers.
    """
    # XGBoost's texts must not mix with the answers.
    print_to(errors)
    from xgboost.core import XGBoostError
    from xgboost.tracker import RabitTracker

    # This queue keeps the tracker of the current run and the tracker of the next run, and frees older trackers. Freeing
    # an older tracker is safe, because it has ended with its run. (When a run fails, the driver kills this whole
    # process.)
    trackers: deque[RabitTracker] = deque(maxlen=2)
    with os.fdopen(requests) as lines, os.fdopen(answers, "w", buffering=1) as answered:
        try:
            while True:
                # Starting a tracker takes 0.1 s, which is 5 % of the time of a small training. Therefore the tracker of
                # the next run is started already while the workers train.
                trackers.append(RabitTracker(n_workers=num_workers, host_ip=host, sortby="task"))
                trackers[-1].start()
                if not lines.readline():
                    break
                print(json.dumps(trackers[-1].worker_args()), file=answered)
        except (XGBoostError, OSError, ValueError) as exc:
            print(json.dumps({"error": str(exc).split("Stack trace")[0].strip()}), file=answered)
        # os._exit() is used, because sys.exit() would free the trackers, and freeing a tracker that still waits for
        # workers could hang.
        os._exit(0)


if __name__ == "__main__":
    # XGBoost imports these packages if they are installed, but the tracker does not need them. Without these imports
    # the process starts in 0.5 s instead of 1.5 s.
    for optional in ("sklearn", "pandas"):
        sys.modules[optional] = None  # type: ignore[assignment]
    run(0, os.dup(1), 2, sys.argv[1], int(sys.argv[2]))
