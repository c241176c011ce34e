from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from shoal.training.host.own_process import ending_forks

pytestmark = pytest.mark.processes


def raise_error() -> None:
    raise ValueError("in the child")


@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [
        (lambda: None, 1, "because it returned from the user's function"),
        (raise_error, 1, "ValueError: in the child"),
        (sys.exit, 0, ""),
        (lambda: sys.exit(300), 300 - 256, ""),
        (lambda: sys.exit("no arguments"), 1, "no arguments"),
    ],
    ids=["returns", "raises", "exits", "exits with a number", "exits with a text"],
)
def test_a_fork_ends_where_it_leaves_the_users_code(
    leave: Callable[[], object], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = os.getpid()
    with ending_forks():
        if not (pid := os.fork()):
            leave()
    assert os.getpid() == parent
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    out = "".join(capfd.readouterr())
    assert said in out if said else not out


def test_the_process_itself_goes_on() -> None:
    with ending_forks():
        pass
    with pytest.raises(SystemExit), ending_forks():
        sys.exit(1)
