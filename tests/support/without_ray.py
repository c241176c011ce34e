"""This process as a driver on a pool without Ray, whose nodes all belong to this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shoal.node_register import NodeRegister, RegisteredNode, Registration
from shoal.training import cluster


def registered(register: NodeRegister, number: int, cpus: int) -> Registration:
    """Register a node of this process; number 0 is the head."""
    folder = register.folder.parent / f"folder-{number}"
    folder.mkdir()
    environment = {"SHOAL_NODE_ID": f"id-{number}"}
    name = f"here-{number}" if number else "here"
    entry = RegisteredNode(f"id-{number}", name, number == 0, cpus, str(folder), os.getpid(), environment)
    return register.add(entry)


@contextmanager
def nodes_without_ray(*cpus: int) -> Iterator[NodeRegister]:
    """Let this process start workers as child processes on nodes with so many CPUs."""
    with ExitStack() as stack:
        register = NodeRegister.path_in(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-test-"))))
        made = NodeRegister(register)
        for number, each in enumerate(cpus):
            stack.callback(registered(made, number, each).remove)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(cluster, "_register", made)
        yield made
