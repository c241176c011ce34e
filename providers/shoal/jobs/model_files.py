"""The files that a job leaves: its model, and what the training reported; complete or absent."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.jobs.attempts import Key
from shoal.state.home import home

if TYPE_CHECKING:
    from shoal.jobs.spec import JobResult
    from shoal.training.request import TrainResult

_MODELS = {"xgboost": "model.ubj", "lightgbm": "model.txt"}
"""What the model is called; either library goes by the ending."""
_REPORT = "training.json"


def folder(key: Key, artifact_location: str | None) -> str:
    """Where an attempt's files go: a local path or a URI."""
    root = artifact_location.rstrip("/") if artifact_location else str(home() / "jobs")
    return f"{root}/{key.job_id}/{key.attempt}"


def save(folder: str, trained: TrainResult) -> str:
    """Write what a training returned; returns the model's path.

    The model comes last: where it is, the rest is too.
    """
    _write(f"{folder}/{_REPORT}", trained.model_dump_json(exclude={"model"}).encode())
    path = f"{folder}/{_MODELS[trained.framework]}"
    _write(path, trained.model)
    return path


def load_training(result: JobResult) -> TrainResult:
    """What the training of a finished job returned: its model, evaluation results and what each worker did.

    Raises:
        FileNotFoundError: Its files are gone, or out of reach from here.
    """
    from shoal.training.request import TrainResult

    report = json.loads(_read(f"{result.model_path.rpartition('/')[0]}/{_REPORT}"))
    report["model"] = b64encode(_read(result.model_path)).decode()
    return TrainResult.model_validate_json(json.dumps(report))


def _write(path: str, content: bytes) -> None:
    if "://" in path:
        import fsspec

        with fsspec.open(path, "wb") as file:  # an object store shows an object when it is complete, and not before
            file.write(content)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)


def _read(path: str) -> bytes:
    if "://" not in path:
        return Path(path).read_bytes()
    import fsspec

    with fsspec.open(path, "rb") as file:
        content = file.read()
    assert isinstance(content, bytes)
    return content
