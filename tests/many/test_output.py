"""The output of each partition is its own, however late the worker reads it."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.kinds.partitions import partition_process
from shoal.kinds.partitions.partition_messages import Begun, Message, Outcome
from shoal.kinds.partitions.partition_process import LOG_BYTES, ForkedProcess
from shoal.secrets.known_secrets import KnownSecrets
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes


def test_output_that_is_read_late_belongs_to_its_partition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def processed(*_: Any) -> Iterator[Message]:
        for key in range(3):
            yield Begun(key, str(key), 1)
            # More than is kept, and together less than a pipe holds, so the process ends before the output is read.
            print("hunter22xyz" * (LOG_BYTES // 4) * (key == 1) + f" of {key}")
            print("password=four words of a\tpassword\n" * (LOG_BYTES // 32) * (key == 2), end="")
            yield Outcome(key, "succeeded", 1, 1, 0.0)
        done.touch()

    # The process is forked, so it has these, too.
    monkeypatch.setattr(partition_process, "_reader", lambda work: None)
    monkeypatch.setattr(partition_process, "_processed", processed)
    process = ForkedProcess(None)  # type: ignore[arg-type]
    try:
        logs = []
        for message in process.messages(None, None):  # type: ignore[arg-type]
            wait_until(done.exists, "the end of all partitions")
            if isinstance(message, Outcome):
                logs.append(process.log(KnownSecrets(["hunter22xyz"])))
    finally:
        process.end()
        gc.unfreeze()
    assert logs[0] == " of 0\n"
    assert logs[1].endswith("*** of 1\n") and not re.search("[hunter2xyz]{4}", logs[1]), "no half of a secret"
    assert set(logs[2].splitlines()) == {"password=*** words of a\tpassword"}, "it begins with a line"
