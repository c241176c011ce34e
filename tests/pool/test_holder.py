from __future__ import annotations

import getpass
import os

from shoal.os_processes import hostname
from shoal.pool.holder import cli_holder, python_holder


def test_a_uid_without_a_name_stands_for_the_user(monkeypatch):
    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", no_name)

    assert cli_holder() == f"cli:{os.getuid()}@{hostname()}"
    assert python_holder() == f"python:{os.getuid()}@{hostname()}/{os.getpid()}"
