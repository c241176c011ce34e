"""Stages of Snowflake as folders, and what a function that is called for a partition gets: rows and a context.

A stage is a folder here: a path, a URI, or a name, which stands for a folder in ``$SHOAL_HOME/stages``. Artifacts are
in ``<stage>/<run_id>/<partition_id>/``, as in Snowflake.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import TorchDefaults
from shoal.data.parquet.source import ParquetSource
from shoal.errors import InvalidArgumentError
from shoal.jobs.files import storage
from shoal.state.home import home
from shoal.training.locations import filesystem, local_path, resolved

if TYPE_CHECKING:
    import pandas as pd

RUN_FILE = ".shoal-run.json"
"""Name of the file in the folder of a run that names its job."""

TORCH_DEFAULTS = TorchDefaults(expand_dims=True, drop_last_batch=True)
"""Shapes that Snowflake gives to tensors."""


def connector_to(path: str) -> DataConnector:
    """Return a connector to Parquet files, whose tensors have Snowflake's shapes."""
    return DataConnector(ParquetSource(path), torch_defaults=TORCH_DEFAULTS)


def stage_root(stage_name: str) -> str:
    """Return the folder or URI of a stage: a path or URI itself, or the folder of a name such as ``@db.schema.stage``.

    Raises:
        InvalidArgumentError: The name is empty.
    """
    name = stage_name.removeprefix("@").rstrip("/")
    if not name:
        raise InvalidArgumentError("stage_name is empty: give a path, a URI or a name")
    if stage_name.startswith("@") or ("/" not in name and "://" not in name):
        first, *rest = name.split("/")
        return "/".join([str(home() / "stages" / quote(first, safe="")), *rest])
    return local_path(resolved(name, "stage_name")).rstrip("/")


class StageArtifactsManager:
    """The artifacts of a partition: files in a folder of the stage.

    Args:
        folder: Folder or URI.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def list(self) -> list[str]:
        """Return the names of the files."""
        fs, root = filesystem(self.folder)
        try:
            found = fs.ls(root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def get(self, filename: str, read_function: Callable[[str], Any] | None = None) -> Any:
        """Read an artifact: with ``pickle``, or with a function of the path of a local copy."""
        with tempfile.TemporaryDirectory(prefix="shoal-artifact-") as folder:
            path = self.download(filename, folder)
            if read_function is not None:
                return read_function(path)
            with open(path, "rb") as file:
                return pickle.load(file)

    def download(self, filename: str, local_dir: str) -> str:
        """Copy an artifact to a local directory, and return the path of the copy."""
        path = os.path.join(local_dir, checked_name(filename))
        Path(path).write_bytes(storage.read(f"{self.folder}/{filename}"))
        return path

    def put(self, obj: Any, filename: str, write_function: Callable[[Any, str], Any] | None = None) -> None:
        """Write an artifact: with ``pickle``, or with a function of the object and the path of a local file."""
        target = f"{self.folder}/{checked_name(filename)}"
        if write_function is None:
            import cloudpickle

            storage.write(target, cloudpickle.dumps(obj))
            return
        with tempfile.TemporaryDirectory(prefix="shoal-artifact-") as folder:
            path = os.path.join(folder, filename)
            write_function(obj, path)
            storage.write(target, Path(path).read_bytes())


def checked_name(filename: str) -> str:
    """Return the name of an artifact.

    Raises:
        InvalidArgumentError: The name is a path.
    """
    if not filename or "/" in filename or filename in (".", "..", RUN_FILE):
        raise InvalidArgumentError(f"{filename!r} is no name of an artifact: give a plain file name, without folders")
    return filename


class PartitionContext:
    """Context of a partition, which Snowflake passes to the function as second argument.

    Args:
        partition_id: Value of the column as text, or the path of the file below the stage's folder.
        run_folder: Folder of the run in the stage.
    """

    def __init__(self, partition_id: str, run_folder: str) -> None:
        self.partition_id = partition_id
        self._artifacts = StageArtifactsManager(f"{run_folder}/{partition_id}")

    def upload_to_stage(self, obj: Any, filename: str, write_function: Callable[[Any, str], Any] | None = None) -> None:
        """Write an artifact of this partition; see `StageArtifactsManager.put`."""
        self._artifacts.put(obj, filename, write_function)

    def download_from_stage(
        self, filename: str, stage_path: str | None = None, read_function: Callable[[str], Any] | None = None
    ) -> Any:
        """Read an artifact of this partition, or of the folder `stage_path`, such as ``@stage/run_id/partition_id``."""
        found = self._artifacts if stage_path is None else StageArtifactsManager(stage_root(stage_path))
        return found.get(filename, read_function)

    def with_session(self, func: Callable[[Any], Any]) -> Any:
        """Refuse the call, because there is no Snowflake session here.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            "with_session needs a session of Snowflake: return the rows with upload_to_stage, or write them with a "
            "connection that the function opens"
        )


class PartitionConnector:
    """Connector to the rows of a partition, which Snowflake passes to the function as first argument.

    Args:
        rows: Rows of the partition.
        folder: Empty local folder that is removed when the function has returned.
    """

    def __init__(self, rows: pd.DataFrame, folder: str) -> None:
        self._rows = rows
        self._folder = folder

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Return the rows, or the first `limit` rows."""
        return self._rows if limit is None else self._rows.head(limit)

    def to_torch_dataset(self, **options: Any) -> Any:
        """Return a torch dataset of the rows; the options are those of `DataConnector.to_torch_dataset`."""
        return self._connector.to_torch_dataset(**options)

    @cached_property
    def _connector(self) -> Any:
        path = os.path.join(self._folder, "rows.parquet")
        self._rows.to_parquet(path)
        return connector_to(path)


class ModelSerde(ABC):
    """How a model is stored in a file. Subclasses define `filename`, `write` and `read`."""

    @property
    @abstractmethod
    def filename(self) -> str:
        """Return the name of the file."""

    @abstractmethod
    def write(self, model: Any, file_path: str) -> None:
        """Write a model into a file."""

    @abstractmethod
    def read(self, file_path: str) -> Any:
        """Read a model from a file."""


class PickleSerde(ModelSerde):
    """Models as pickle, in the file ``model.pkl``."""

    filename: ClassVar[str] = "model.pkl"

    def write(self, model: Any, file_path: str) -> None:
        """Pickle a model into a file."""
        import cloudpickle

        Path(file_path).write_bytes(cloudpickle.dumps(model))

    def read(self, file_path: str) -> Any:
        """Unpickle a model from a file."""
        with open(file_path, "rb") as file:
            return pickle.load(file)


class TorchSerde(ModelSerde):
    """PyTorch models, in the file ``model.pth``."""

    filename: ClassVar[str] = "model.pth"

    def write(self, model: Any, file_path: str) -> None:
        """Write a model with ``torch.save``."""
        import torch

        torch.save(model, file_path)

    def read(self, file_path: str) -> Any:
        """Read a model with ``torch.load``."""
        import torch

        return torch.load(file_path, weights_only=False)
