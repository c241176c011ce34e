"""Be a node: `python -m tests.kuberay.agent SETTINGS.json`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.kuberay.agent.node import Node
from tests.kuberay.agent.settings import AgentSettings


async def main(settings: Path) -> None:
    """Be the node of these settings until this process is killed."""
    await Node(AgentSettings.read(settings)).run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
