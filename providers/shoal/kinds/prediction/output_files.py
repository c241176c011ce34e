"""Name the output files of a batch prediction, check which are complete, and publish all of them together.

Files of other programs in the output location are never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.jobs.files import storage
from shoal.kinds.prediction.spec import PredictJobSpec
from shoal.lazy_imports import pa, pq
from shoal.new_files import SHARED_MODE, create_folder
from shoal.secrets.redaction import redacted_errors
from shoal.training import locations
from shoal.training.locations import Claim, filesystem, local_path

MARKER = "_shoal_predictions.json"
"""File that marks a folder of complete predictions. Readers of Parquet skip names with a leading underscore."""

FILE_ROWS = 1_000_000
"""Rows after which a new output file begins. A few large files are faster to list and open than many."""

_PART = re.compile(r"part-\d{12}-\d+\.parquet")


def file_name(first_row: int, rows: int) -> str:
    """Return the name of an output file. If the files are sorted by name, they are in the order of the rows."""
    return f"part-{first_row:012d}-{rows}.parquet"


def is_complete(filesystem: Any, path: str, rows: int) -> bool:
    """Return whether a Parquet file exists and has the given number of rows."""
    if not filesystem.get_file_info(path).is_file:
        return False
    try:
        return bool(pq.read_metadata(path, filesystem=filesystem).num_rows == rows)
    except (OSError, pa.ArrowException):
        return False


def predictions_key(spec: PredictJobSpec, model: str, rows: str) -> str:
    """Return a digest of the rows, the model and the columns, which together determine the predictions."""
    columns = (spec.keep_cols, spec.prediction_col, spec.input_cols)
    return hashlib.sha256(json.dumps([model, rows, *columns]).encode()).hexdigest()


class Output:
    """Output location of a batch prediction: a local folder or a URI of an object store.

    If the output is a local folder, the workers write to a folder beside it, which is renamed when it is complete. An
    object store cannot rename folders. In an object store, the workers write to a subfolder of the output that readers
    of Parquet skip; then the files are moved one by one, and the marker file is written last.

    Args:
        path: Directory or URI of the predictions.
        claim: Job and attempt that predict.
        may_publish: Function that returns whether this attempt may still publish; called right before publishing.
        has_ended: Function that returns whether the attempt that a folder's marker file names (the claim) is known and
            has ended.
    """

    def __init__(
        self,
        path: str,
        claim: Claim,
        may_publish: Callable[[], bool] = lambda: True,
        has_ended: Callable[[Claim], bool] = lambda claim: False,
    ) -> None:
        self.path = local_path(path)
        self._claim = claim
        self._may_publish = may_publish
        self._has_ended = has_ended
        self._local = "://" not in self.path
        self.staging = self._staging_of(claim.attempt)
        """Directory or URI to which the workers write."""

    def finished(self, key: str, *, overwrite: bool) -> bool:
        """Return whether the output location already has complete predictions of the same rows by the same model.

        Raises:
            InvalidArgumentError: The output location has other files, or other predictions that must not be replaced.
        """
        if not (found := self._names()):
            return False
        marker = self._marker()
        ours = all(map(_is_ours, found))
        if ours and marker is None and not self._local:
            return False  # these files are from an interrupted publication, and the next publication removes them
        if marker is None or not ours:
            raise InvalidArgumentError(
                f"{self.path} contains files that are not complete predictions of shoal: choose another output_path, "
                "or move these files to another folder"
            )
        if marker.get("key") == key and set(marker.get("files", ())) <= set(found):
            return True
        if not overwrite and marker.get("key") != key:
            raise InvalidArgumentError(
                f"{self.path} already has other predictions, by the model {marker.get('model')}: the rows, the model "
                "or the columns differ from those of this job. Choose another output_path, or set overwrite=True to "
                "replace the predictions"
            )
        return False

    def restore(self) -> None:
        """Put earlier local predictions back in their place if an attempt of this job died while it replaced them.

        If the new predictions are already in place, remove the earlier predictions.
        """
        place = Path(self.path)
        for attempt in range(1, self._claim.attempt + 1) if self._local else ():
            aside = self._aside(attempt)
            if aside.is_dir() and not place.exists():
                aside.rename(place)
            elif aside.is_dir():
                _remove(aside)

    def prepare(self) -> None:
        """Create an empty staging folder, and remove the staging folders that ended attempts have left.

        The ended attempts are earlier attempts of this job, and attempts of other jobs with the same output location.
        """
        for attempt in range(1, self._claim.attempt):
            # `remove` raises an InvalidArgumentError if the folder belongs to a newer attempt. In that case the folder
            # is kept.
            with contextlib.suppress(InvalidArgumentError):
                self._claim.remove(self._staging_of(attempt))
        place = Path(self.path)
        parent, begin = (str(place.parent), f".{place.name}.") if self._local else (self.path, "_.")
        for name in locations.names_in(parent):
            if name.startswith(begin) and name.endswith(".partial"):
                claim = locations.read_claim(f"{parent}/{name}")
                if claim is not None and self._has_ended(claim):
                    claim.remove(f"{parent}/{name}")
        if self._local:
            create_folder(place.parent, SHARED_MODE)
        self._claim.take(self.staging)

    def publish(self, names: Iterable[str], *, key: str, model: str, rows: int, overwrite: bool) -> None:
        """Move the written files from the staging folder to the output location, and mark them there as complete.

        Raises:
            TrainingError: A file is missing, because its worker's node wrote it to a disk that this node cannot see; a
                newer attempt has begun; or another program has added files to the folder.
            InvalidArgumentError: Another job has published other predictions at the output location meanwhile.
        """
        expected = set(names)
        if missing := sorted(expected - set(locations.names_in(self.staging))):
            raise TrainingError(
                f"{len(missing)} files with predictions, such as {missing[0]}, are missing in {self.staging}: set "
                "output_path to a directory or URI that all nodes can reach"
            )
        if not self._may_publish():
            raise TrainingError(
                f'the predictions of attempt {self._claim.attempt} of job "{self._claim.job_id}" are not published, '
                "because the attempt has ended or a newer attempt has begun"
            )
        if self.finished(key, overwrite=overwrite):
            return  # another job has published the same predictions meanwhile, so nothing is left to do
        content = json.dumps({"key": key, "model": model, "rows": rows, "files": sorted(expected)}).encode()
        if self._local:
            # Files that are not expected are unfinished files of workers that were killed.
            for stray in set(locations.names_in(self.staging)) - expected - {locations.MARKER}:
                (Path(self.staging) / stray).unlink()
            storage.write(f"{self.staging}/{MARKER}", content)
            self._swap()
        else:
            self._clear()
            fs, root = filesystem(self.path)
            _, staging = filesystem(self.staging)
            with redacted_errors(self.path):
                for name in sorted(expected):
                    fs.mv(f"{staging}/{name}", f"{root}/{name}")
            storage.write(f"{self.path}/{MARKER}", content)
            self._claim.remove(self.staging)

    def discard(self) -> None:
        """Remove the staging folder, with all files in it that are not published yet."""
        with contextlib.suppress(InvalidArgumentError, OSError):
            self._claim.remove(self.staging)

    def _staging_of(self, attempt: int) -> str:
        name = f".{self._claim.job_id}.{attempt}.partial"
        place = Path(self.path)
        return str(place.parent / f".{place.name}{name}") if self._local else f"{self.path}/_{name}"

    def _aside(self, attempt: int) -> Path:
        return Path(self._staging_of(attempt)).with_suffix(".replaced")

    def _swap(self) -> None:
        final, staging = Path(self.path), Path(self.staging)
        if not final.exists():
            staging.rename(final)
            return
        aside = self._aside(self._claim.attempt)
        final.rename(aside)
        try:
            # The old folder is checked only after it was renamed, so that no other program can add a file to the folder
            # between the check and the removal.
            self._refuse_foreign(path.name for path in aside.iterdir())
            staging.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        _remove(aside)

    def _clear(self) -> None:
        """Remove earlier predictions from an object store. The marker file, which declares them complete, is removed
        first."""
        fs, root = filesystem(self.path)
        with redacted_errors(self.path):
            names = self._names()
            self._refuse_foreign(names)
            for name in sorted(names, key=lambda name: name != MARKER):
                fs.rm_file(f"{root}/{name}")

    def _refuse_foreign(self, names: Iterable[str]) -> None:
        if foreign := [name for name in names if not _is_ours(name)]:
            raise TrainingError(
                f"the file {foreign[0]} was added to {self.path} by another program during the job: move the file to "
                "another folder, and run the job again"
            )

    def _names(self) -> list[str]:
        """Return the names of the files in the output folder; staging folders are left out."""
        if self._local and (Path(self.path).is_symlink() or Path(self.path).is_file()):
            raise InvalidArgumentError(
                f"{self.path} is a file or a symbolic link, but must be a folder: choose another output_path"
            )
        return [name for name in locations.names_in(self.path) if not name.endswith(".partial")]

    def _marker(self) -> dict[str, Any] | None:
        try:
            found = json.loads(storage.read(f"{self.path}/{MARKER}"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _is_ours(name: str) -> bool:
    return name in (MARKER, locations.MARKER) or _PART.fullmatch(name) is not None


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
