"""What an agent is started with, as a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class AgentSettings:
    """The node that an agent is, and its means."""

    name: str
    server: str
    token: str
    authority: str  # file with the certificate of the API server's authority
    certificate: str  # file with a certificate for the node's address, for the log endpoint
    key: str
    switch: str  # network namespace with the bridge
    network: str  # the first three numbers of its addresses
    first_address: int  # pods have `addresses` numbers from here on
    addresses: int
    log_port: int
    folder: str
    images: str  # file with the table of images; it may change
    allocatable: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[dict[str, str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The address of the machine on the bridge: all nodes have it."""
        return f"{self.network}.1"

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.__dict__))
        path.chmod(0o600)

    @classmethod
    def read(cls, path: Path) -> AgentSettings:
        """Read the file."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Image:
    """What stands for an image: an environment of Python, and folders that a container must see.

    Only folders below `/tmp` need to be named: everything else of the machine's file system is visible anyway.
    """

    environment: str
    visible: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls, table: str, name: str) -> Image | None:
        """The image of this name in the table now; None if there is none."""
        found = json.loads(Path(table).read_text()).get(name)
        return cls(found["environment"], tuple(found["visible"]), found["variables"]) if found else None
