"""The files that ranks leave in their model folders, merged into one folder that is complete or absent."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.claims import Claim
from shoal.training.context import say

_BLOCK_BYTES = 2**20


def digests(folder: Path) -> dict[str, str]:
    """The files under a folder: path from there -> SHA-256."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


def shared_out(files: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Which rank uploads which files: of those that several have, the lowest of them.

    Args:
        files: By rank, what :func:`digests` found.

    Returns:
        Paths by rank.
    """
    owner: dict[str, int] = {}
    differ = set()
    for rank, found in enumerate(files):
        for path, digest in found.items():
            if digest != files[owner.setdefault(path, rank)][path]:
                differ.add(path)
    for path in sorted(differ):
        say(f"{path} in the model folder is not the same on all ranks: that of rank {owner[path]} is kept")
    return [[path for path, first in owner.items() if first == rank] for rank in range(len(files))]


def upload(folder: Path, paths: Iterable[str], target: str) -> None:
    """Copies files.

    Args:
        folder: Where they are.
        paths: Which, from there.
        target: Directory or URI.
    """
    import fsspec

    fs, root = fsspec.core.url_to_fs(target)
    for path in paths:
        to = f"{str(root).rstrip('/')}/{path}"
        fs.makedirs(to.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(folder / path), to)


class Destination:
    """Where a run's merged model folder goes.

    Args:
        location: Directory or URI for artifacts.
        claim: Says which folders the run may replace, and what its own are called.
        may_publish: Whether this run may still publish, asked right before it does.
    """

    def __init__(self, location: str, claim: Claim, may_publish: Callable[[], bool]) -> None:
        self.path = f"{location.rstrip('/')}/model/{claim.job_id}"
        self._claim = claim
        self._may_publish = may_publish
        local = "://" not in location
        # Of this attempt alone: the ranks of an older one, whose driver was paused, may still be uploading.
        partial = f"{location.rstrip('/')}/model/.{claim.job_id}.{claim.attempt}.partial"
        self.staging = partial if local else self.path
        """Where ranks upload to. An object store has no folders to rename: there it is the place itself."""

    def check(self) -> None:
        """Refuse a model folder that this run must not replace; put back one whose replacement was killed half-way.

        Raises:
            InvalidArgumentError: It is of something else, or of a newer attempt.
        """
        if self.staging != self.path:
            self._restore()
        self._claim.check(self.path)
        self._claim.check(self.staging)

    def prepare(self) -> None:
        """Remove what earlier attempts have left unfinished; where nothing can be renamed, all that they have left.

        Raises:
            TrainingError: A newer attempt has taken over.
            InvalidArgumentError: As :meth:`check`.
        """
        self._require_permission()
        self._claim.take(self.staging)
        if self.staging != self.path:
            self._remove_leftovers("partial", keep=Path(self.staging))

    def commit(self, files: Iterable[str]) -> str:
        """Put the uploaded files in their place; returns it.

        Args:
            files: What was uploaded, as paths in the folder.

        Raises:
            TrainingError: If one is not there, because its rank's node wrote it elsewhere; or if a newer attempt has
                taken over.
        """
        import fsspec

        fs, root = fsspec.core.url_to_fs(self.staging, use_listings_cache=False)
        missing = [path for path in files if not fs.exists(f"{str(root).rstrip('/')}/{path}")]
        if missing:
            raise TrainingError(
                f"{len(missing)} files of the model, {missing[0]} among them, did not arrive in {self.staging}: set "
                "artifact_location to a directory or URI that all nodes reach"
            )
        self._require_permission()
        try:
            self._claim.check(self.staging)
            if self.staging != self.path:
                self._swap(Path(self.path), Path(self.staging))
        except InvalidArgumentError as error:
            raise TrainingError(str(error)) from error
        return self.path

    def discard(self) -> None:
        """Remove what was uploaded; what belongs to a newer attempt stays."""
        self._remove(self.staging)

    def _require_permission(self) -> None:
        if not self._may_publish():
            raise TrainingError(
                f'attempt {self._claim.attempt} of job "{self._claim.job_id}" has ended or a newer one has begun: '
                "its model is not published"
            )

    def _swap(self, final: Path, staging: Path) -> None:
        """Put a folder in another's place, looking at the other only when nobody else can replace it any more."""
        if not final.is_symlink() and not final.exists():
            staging.rename(final)
            return
        aside = staging.with_suffix(".replaced")
        self._claim.remove(str(aside))
        final.rename(aside)
        try:
            self._claim.check(str(aside))
            staging.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        self._remove_leftovers("replaced")

    def _restore(self) -> None:
        """Put the model of an earlier attempt back, after a process was killed between the two renames of a swap."""
        final = Path(self.path)
        for aside in self._beside("replaced"):
            if not final.is_symlink() and not final.exists():
                with contextlib.suppress(InvalidArgumentError, OSError):
                    if self._claim.check(str(aside)):
                        aside.rename(final)

    def _remove_leftovers(self, kind: str, keep: Path | None = None) -> None:
        for folder in self._beside(kind):
            if folder != keep:
                self._remove(str(folder))

    def _beside(self, kind: str) -> list[Path]:
        return sorted(Path(self.path).parent.glob(f".{self._claim.job_id}.*.{kind}"))

    def _remove(self, folder: str) -> None:
        """Remove a folder if it is of this job; a failure does not keep the model from being published."""
        try:
            # The name may be of another job (of "a.1" where this is "a"), or a newer attempt's.
            with contextlib.suppress(InvalidArgumentError):
                self._claim.remove(folder)
        except OSError as error:
            say(f"{folder} is left behind: {error}")
