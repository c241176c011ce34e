"""Write the output folder of a batch prediction so that its marker file shows when all predictions are there.

An existing folder is replaced only if shoal has written all files in it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.jobs.files import storage
from shoal.redaction import redacted_errors
from shoal.training import claims
from shoal.training.claims import Claim

MARKER = "_shoal_predictions.json"
"""Name of the file that marks a folder with complete predictions. The name begins with an underscore, because readers
of Parquet folders skip such files."""

_PART = re.compile(r"part-\d{12}-\d+\.parquet")


class Output:
    """The output folder of a batch prediction, with the staging folder to which the workers write first.

    For a local output folder, the staging folder lies beside it, and is renamed when all files are complete. Object
    stores cannot rename folders. For them, the staging folder lies inside the output folder, with a name that readers
    skip. The complete files are then moved one by one, and the marker file is written last.

    Args:
        path: Directory or URI of the predictions.
        claim: Job and attempt that predict.
        may_publish: Function that returns whether this attempt may still publish its predictions. It is called right
            before that, because a newer attempt may have replaced this one.
    """

    def __init__(self, path: str, claim: Claim, may_publish: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self._claim = claim
        self._may_publish = may_publish
        self._local = "://" not in path
        beside = f".{claim.job_id}.{claim.attempt}.partial"
        place = Path(path)
        self.staging = str(place.parent / f".{place.name}{beside}") if self._local else f"{path}/_{beside}"
        """Directory or URI of the staging folder, to which the workers write."""

    def finished(self, key: str, *, overwrite: bool) -> dict[str, Any] | None:
        """Return the content of the marker file if the output folder already has the same predictions, else None.

        Args:
            key: Digest of the rows, the model and the columns, which together determine the predictions.
            overwrite: Whether other predictions may be replaced.

        Raises:
            InvalidArgumentError: The output folder has files that shoal has not written, or has other predictions and
                `overwrite` is False.
        """
        found = self._names()
        if not found:
            return None
        marker = self._marker()
        if marker is None or not all(map(_is_ours, found)):
            raise InvalidArgumentError(
                f"{self.path} is not empty, and shoal has not written all that is in it: choose another output_path, "
                "or move its content away"
            )
        if marker.get("key") == key:
            return marker
        if not overwrite:
            raise InvalidArgumentError(
                f"{self.path} has predictions of {marker.get('model')} for other rows, another model or other columns: "
                "choose another output_path, or set overwrite=True"
            )
        return None

    def prepare(self) -> None:
        """Create an empty staging folder, and remove the staging folders of earlier attempts of this job."""
        if self._local:
            place = Path(self.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            for leftover in place.parent.glob(f".{place.name}.{self._claim.job_id}.*.partial"):
                with contextlib.suppress(InvalidArgumentError):  # not removed: a newer attempt's folder
                    self._claim.remove(str(leftover))
            for replaced in place.parent.glob(f".{place.name}.{self._claim.job_id}.*.replaced"):
                _remove(replaced)
        self._claim.take(self.staging)

    def publish(self, names: Iterable[str], marker: dict[str, Any]) -> None:
        """Move the written files from the staging folder to the output folder, and write the marker file.

        Args:
            names: Names of all files that the workers have written.
            marker: Content of the marker file: `key`, `model` and `rows`.

        Raises:
            TrainingError: A file is missing, because a worker wrote it to a disk that this node cannot reach. Or this
                attempt has ended, or a newer attempt has begun.
        """
        expected = set(names)
        missing = sorted(expected - set(_list(self.staging)))
        if missing:
            raise TrainingError(
                f"{len(missing)} files of the predictions, {missing[0]} among them, did not arrive in {self.staging}: "
                "set output_path to a directory or URI that all nodes can reach"
            )
        if not self._may_publish():
            raise TrainingError(
                f'attempt {self._claim.attempt} of job "{self._claim.job_id}" has ended, or a newer attempt has begun: '
                "its predictions are not published"
            )
        content = json.dumps(marker).encode()
        if self._local:
            for stray in set(_list(self.staging)) - expected - {claims.MARKER}:  # files of killed workers
                (Path(self.staging) / stray).unlink()
            storage.write(f"{self.staging}/{MARKER}", content)
            self._swap()
        else:
            self._clear()
            self._move(expected)
            storage.write(f"{self.path}/{MARKER}", content)
            self._claim.remove(self.staging)

    def discard(self) -> None:
        """Remove the staging folder if it still exists and belongs to this attempt; errors are ignored."""
        with contextlib.suppress(InvalidArgumentError, OSError):
            self._claim.remove(self.staging)

    def _swap(self) -> None:
        final, staging = Path(self.path), Path(self.staging)
        if not final.exists():
            staging.rename(final)
            return
        aside = staging.with_suffix(".replaced")
        final.rename(aside)
        try:
            # The old folder's content is checked after the folder was renamed, so that no other program can write a
            # file into it between the check and the removal.
            if foreign := [path.name for path in aside.iterdir() if not _is_ours(path.name)]:
                raise TrainingError(
                    f"{foreign[0]} has come into {final} meanwhile, and shoal has not written it: move it away"
                )
            staging.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        _remove(aside)

    def _clear(self) -> None:
        """Remove earlier predictions from an object store.

        The marker file is removed first, so that a half-removed folder does not count as complete.
        """
        fs, root = _filesystem(self.path)
        with redacted_errors(self.path):
            for name in sorted(self._names(), key=lambda name: name != MARKER):
                fs.rm_file(f"{root}/{name}")

    def _move(self, names: Iterable[str]) -> None:
        fs, root = _filesystem(self.path)
        _, staging = _filesystem(self.staging)
        with redacted_errors(self.path):
            for name in sorted(names):
                fs.mv(f"{staging}/{name}", f"{root}/{name}")

    def _names(self) -> list[str]:
        """Return the names of the files in the output folder, without staging folders."""
        if self._local and (Path(self.path).is_symlink() or Path(self.path).is_file()):
            raise InvalidArgumentError(
                f"{self.path} is a file or a link, but has to be a folder: choose another output_path"
            )
        return [name for name in _list(self.path) if not name.endswith(".partial")]

    def _marker(self) -> dict[str, Any] | None:
        try:
            found = json.loads(storage.read(f"{self.path}/{MARKER}"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _is_ours(name: str) -> bool:
    return name in (MARKER, claims.MARKER) or _PART.fullmatch(name) is not None


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _filesystem(folder: str) -> tuple[Any, str]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(folder, use_listings_cache=False)
    return fs, str(root).rstrip("/")


def _list(folder: str) -> list[str]:
    """Return the names of the files and folders in a folder, sorted; an empty list if the folder does not exist."""
    with redacted_errors(folder):
        fs, root = _filesystem(folder)
        try:
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False))
        except FileNotFoundError:
            return []
