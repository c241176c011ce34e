"""JSON patches (RFC 6902), applied and refused as the Kubernetes API does it."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class Refused(Exception):
    """An answer with an error, as the API writes it."""

    def __init__(self, status: int, reason: str, message: str, name: str | None = None) -> None:
        super().__init__(message)
        details = {"details": {"name": name}} if name else {}
        self.status = status
        self.body = {
            "kind": "Status",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": status,
        } | details


def apply(made: Object, patch: list[Object]) -> None:
    """Apply a JSON patch (RFC 6902) with the operations test, add, replace and remove."""
    for operation in patch:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = made
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place.get(part)
            if place is None:
                raise Refused(422, "Invalid", f"the path {operation['path']} does not exist")
        key: Any = int(last) if isinstance(place, list) else last
        kind = operation["op"]
        if kind == "test":
            if place.get(key) != operation["value"]:
                raise Refused(422, "Invalid", f"testing path {operation['path']} value failed")
        elif kind == "remove":
            del place[key]
        else:
            place[key] = operation["value"]
