"""Names of services, as lines of the hosts file of each pod: this stands for the DNS of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SUFFIX = "svc.cluster.local"


class Names:
    """Which addresses each service has now. A service's name leads to its pods, with and without a cluster IP."""

    def __init__(self) -> None:
        self._slices: dict[str, tuple[str, str, list[str]]] = {}

    def changed(self, kind: str, found: Any) -> None:
        """Take over a list of endpoint slices, or a change of one."""
        if kind == "LIST":
            self._slices.clear()
        for each in found if kind == "LIST" else [found]:
            about = each["metadata"]
            key = f"{about['namespace']}/{about['name']}"
            if kind == "DELETED":
                self._slices.pop(key, None)
                continue
            ready = [
                address
                for endpoint in each.get("endpoints") or ()
                if endpoint.get("conditions", {}).get("ready") is not False
                for address in endpoint["addresses"]
            ]
            service = about.get("labels", {}).get("kubernetes.io/service-name", "")
            self._slices[key] = (about["namespace"], service, ready)

    def hosts(self, pod: dict[str, Any], address: str) -> str:
        """The hosts file of a pod."""
        own = pod["metadata"]["namespace"]
        lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost", f"{address}\t{pod['metadata']['name']}"]
        for namespace, service, addresses in self._slices.values():
            for each in addresses:
                names = [f"{service}.{namespace}.{SUFFIX}", f"{service}.{namespace}.svc", f"{service}.{namespace}"]
                lines.append("\t".join([each, *names, *([service] if namespace == own else [])]))
        return "\n".join(lines) + "\n"


def rewrite(path: Path, text: str) -> None:
    """Replace a file's content in place: containers have mounted this very file."""
    if not path.exists():
        path.write_text(text)
    elif path.read_text() != text:
        with path.open("r+") as file:
            file.write(text)
            file.truncate()
