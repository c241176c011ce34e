"""What a job takes along by value."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import shipped_code
from shoal.training.boosting.params import UserCode


class Mine:
    """Of a module that no node can import."""

    def __init__(self, value: int) -> None:
        self.value = value

    def double(self) -> int:
        return 2 * self.value


def scaled(factor: float, predictions: float, labels: float) -> float:
    return factor * (predictions - labels)


@pytest.mark.processes
def test_it_needs_nothing_of_the_sender_where_it_is_read(fresh_home: Path) -> None:
    along = UserCode(callbacks=(Mine(21), sorted), objective=partial(scaled, 2.0), metrics=(scaled,))
    path = shipped_code.store_user_code(along)
    read = f"from shoal.jobs import shipped_code\nalong = shipped_code.load_user_code({path!r})"
    read += "\nmine, other = along.callbacks"
    read += "\nprint(mine.double(), other([2, 1]), along.objective(3, 1), along.metrics[0](1, 3, 1), along.names())"
    said = subprocess.run([sys.executable, "-c", read], cwd="/", capture_output=True, text=True, check=True)
    assert said.stdout == "42 [1, 2] 4.0 2 {'objective': 'partial', 'custom_metric': 'scaled'}\n"


def test_what_cannot_be_pickled() -> None:
    with pytest.raises(InvalidArgumentError, match=r"callbacks, objective or metrics cannot be sent .*lock"):
        shipped_code.store_user_code(UserCode(callbacks=(threading.Lock(),)))


def test_what_is_gone_or_was_changed(fresh_home: Path) -> None:
    path = Path(shipped_code.store_user_code(UserCode(callbacks=(1,))))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(JobError, match=r"was changed after it was stored"):
        shipped_code.load_user_code(str(path))
    path.unlink()
    with pytest.raises(JobError, match=r"cannot be read: .*No such file"):
        shipped_code.load_user_code(str(path))
