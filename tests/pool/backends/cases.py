"""The kinds of pool that `test_conformance` is run over: how to have one, and how to hurt it."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field
from typing import Protocol

from shoal.os_processes import ProcessId
from shoal.pool.backends import backend_of
from shoal.pool.backends.interface import Backend
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.backend import node_folder
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.spec import PoolSpec
from shoal.state.schema import Node
from tests.pool.backends.foreign import ForeignCluster
from tests.support.fake_kubernetes import FakeKubernetes


class Case(Protocol):
    """A kind of pool, as its tests need it: it can have two nodes."""

    uri: str

    def lose(self, node: Node) -> None:
        """Have a worker die, as it does outside the tests: by SIGKILL."""

    def mend(self) -> None:
        """Have what was lost come back, where the backend does not bring it back itself."""

    def trace(self, node: Node) -> object:
        """What is left of a node that has ended, if anything."""

    def leave_behind(self, node_id: str) -> bool:
        """Make a node that has no row; False where nobody could."""


def backend(case: Case) -> Backend:
    return backend_of(PoolSpec.parse(case.uri))


@dataclass
class Local:
    """Nodes on this machine, tiny ones or Ray's: who starts them is patched in before."""

    uri: str = "local://conform?max_nodes=4"

    def lose(self, node: Node) -> None:
        ProcessId.from_json(node.supervisor).signal(signal.SIGKILL)

    def mend(self) -> None:
        pass

    def trace(self, node: Node) -> object:
        folder = node_folder(node.id)
        return processes.of_node(node.id, [folder], ProcessId.from_json(node.supervisor)) or folder.exists()

    def leave_behind(self, node_id: str) -> bool:
        node_folder(node_id).mkdir(parents=True)
        self._left = subprocess.Popen(["sleep", "1000"], env={**os.environ, NODE_TAG: node_id})
        return True


@dataclass
class Foreign:
    """A static cluster of two nodes."""

    cluster: ForeignCluster

    @property
    def uri(self) -> str:
        return self.cluster.uri("conform", max_nodes=4)

    def lose(self, node: Node) -> None:
        self.cluster.lose()

    def mend(self) -> None:
        self.cluster.join()

    def trace(self, node: Node) -> object:
        return None if self.cluster.alive() else "the cluster was ended, and is not ours to end"

    def leave_behind(self, node_id: str) -> bool:
        return False


@dataclass
class Kubernetes:
    """A RayCluster without workers, in the double of the Kubernetes API: one that exists, or one that shoal creates."""

    kube: FakeKubernetes
    options: dict[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return self.kube.uri("conform", max_nodes=4, **self.options)

    def lose(self, node: Node) -> None:
        self.kube.become = lambda pod: {"phase": "Pending"}
        self.kube.delete_pod(node.endpoint["pod"])

    def mend(self) -> None:
        self.kube.become = lambda pod: None

    def trace(self, node: Node) -> object:
        if self.options:
            return node.endpoint["pod"] in self.kube.pods(heads=True)
        left = node.endpoint["pod"] in self.kube.pods()
        return left or (None if self.kube.pods(heads=True) else "the head was ended, and is not ours to end")

    def leave_behind(self, node_id: str) -> bool:
        return False
