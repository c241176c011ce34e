"""The folder in which a job with partitions keeps rows, claims, result files and the manifest.

The folder is in the artifact folder of the attempt. If an attempt was killed, the next one takes its folder over, so
that no finished partition is repeated.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from shoal.jobs.files import storage
from shoal.jobs.partitions.result_files import MANIFEST, discard_leftovers
from shoal.training import locations
from shoal.training.locations import Claim, filesystem, is_local, make_folder

_NAME = "partitions"
_PLAN = "plan.json"


def path_in(attempt_folder: str) -> str:
    """Return the path or URI of the folder in the artifact folder of an attempt."""
    return f"{attempt_folder}/{_NAME}"


class WorkFolder:
    """Folder of the rows and results of one attempt.

    Args:
        attempt_folder: Artifact folder of the attempt, which has the attempt's marker file.
        claim: Job and attempt.
    """

    def __init__(self, attempt_folder: str, claim: Claim) -> None:
        self._attempt_folder = attempt_folder
        self._claim = claim
        self.path = path_in(attempt_folder)
        self.rows = f"{self.path}/rows"
        self.results = f"{self.path}/results"
        self.manifest = f"{self.path}/{MANIFEST}"
        self.is_local = is_local(filesystem(attempt_folder)[0])

    def prepare(self, key: str, earlier: Iterable[str]) -> None:
        """Create the folder, or continue with that of an earlier attempt with the same plan.

        Args:
            key: Digest of the dataset, the function and the options, by which an equal plan is recognised.
            earlier: Artifact folders of earlier attempts, the newest first, which did not succeed.
        """
        if self._key(self.path) != key:
            remove_tree(self.path)
            for folder in earlier:
                if self._is_ours(folder) and self._key(f"{folder}/{_NAME}") == key:
                    _move(f"{folder}/{_NAME}", self.path)
                    break
        if self.is_local:
            for folder in (self.rows, self.results):
                make_folder(self._attempt_folder, folder)
        storage.write(f"{self.path}/{_PLAN}", json.dumps({"key": key}).encode())

    def new_claims(self) -> str | None:
        """Create a folder in which the workers of one gang claim buckets; None at a URI, where a file cannot be created
        exclusively."""
        if not self.is_local:
            return None
        folder = f"{self.path}/claims/{uuid.uuid4().hex}"
        make_folder(self._attempt_folder, folder)
        return folder

    def discard_rows(self) -> None:
        """Remove what is not needed when the attempt has ended: rows, claims, and half-written files of killed
        workers."""
        with contextlib.suppress(OSError):
            remove_tree(self.rows)
        with contextlib.suppress(OSError):
            remove_tree(f"{self.path}/claims")
        with contextlib.suppress(OSError):
            discard_leftovers(self.results)

    def _is_ours(self, folder: str) -> bool:
        found = locations.read_claim(folder)
        return found is not None and (found.job_id, found.owner) == (self._claim.job_id, self._claim.owner)

    def _key(self, path: str) -> str | None:
        try:
            return str(json.loads(storage.read(f"{path}/{_PLAN}"))["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _move(source: str, target: str) -> None:
    fs, old = filesystem(source)
    _, new = filesystem(target)
    if is_local(fs):
        Path(old).rename(new)
        return
    for path in fs.find(old):
        fs.mv(path, new + str(path).removeprefix(old))


def remove_tree(folder: str) -> None:
    """Remove a folder of the job with all its files, if it exists. A link is not followed."""
    fs, root = filesystem(folder)
    if is_local(fs):
        if Path(root).is_dir() and not Path(root).is_symlink():
            shutil.rmtree(root)
        return
    # The files are removed one by one, because `fs.rm` treats some characters of a name as a pattern.
    for path in fs.find(root):
        fs.rm_file(path)
