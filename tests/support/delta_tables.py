"""Write the log of a Delta table by hand, with features that the library deltalake cannot write."""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_MAGIC = 1_681_511_377
_WRITERS = ("inCommitTimestamp",)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def commit(root: Path, version: int, *actions: dict[str, Any]) -> None:
    (root / "_delta_log").mkdir(parents=True, exist_ok=True)
    (root / f"_delta_log/{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def protocol(*features: str) -> dict[str, Any]:
    both = {"readerFeatures": [name for name in features if name not in _WRITERS], "writerFeatures": features}
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **both}}


def column(name: str, type_: Any, physical: str | None = None, number: int = 0) -> dict[str, Any]:
    mapping = {"delta.columnMapping.physicalName": physical, "delta.columnMapping.id": number} if physical else {}
    return {"name": name, "type": type_, "nullable": True, "metadata": mapping}


def metadata(
    columns: list[dict[str, Any]], partitions: tuple[str, ...] = (), mode: str | None = None
) -> dict[str, Any]:
    return {
        "metaData": {
            "id": str(uuid.uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": columns}),
            "partitionColumns": partitions,
            "configuration": {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "99"}
            if mode
            else {},
            "createdTime": 0,
        }
    }


def add(file: Path, logged: str, table: pa.Table, stats: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Write a file, and return the action that adds it under the path `logged`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)
    described = {"path": logged, "size": file.stat().st_size, "modificationTime": 0, "dataChange": True}
    return {
        "add": {
            **described,
            "partitionValues": {},
            "stats": json.dumps({"numRecords": len(table), **(stats or {})}),
            **fields,
        }
    }


def deletion_vector(root: Path, positions: list[int], *, inline: bool = False) -> dict[str, Any]:
    """Return the description of a deletion vector of positions below 65,536, and write its file unless it is inline."""
    count = len(positions)
    bitmap = struct.pack(f"<IIHHI{count}H", 12_346, 1, 0, count - 1, 16, *positions)
    data = struct.pack("<IQI", _MAGIC, 1, 0) + bitmap
    described = {"sizeInBytes": len(data), "cardinality": count}
    if inline:
        return {"storageType": "i", "pathOrInlineDv": _z85(data + bytes(-len(data) % 4)), **described}
    name = uuid.uuid4()
    content = b"\1" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    (root / f"deletion_vector_{name}.bin").write_bytes(content)
    return {"storageType": "u", "pathOrInlineDv": _z85(name.bytes), "offset": 1, **described}


def _z85(data: bytes) -> str:
    numbers = [int.from_bytes(data[at : at + 4]) for at in range(0, len(data), 4)]
    return "".join(_DIGITS[number // 85**power % 85] for number in numbers for power in (4, 3, 2, 1, 0))
