"""Create folders whose mode does not depend on the umask alone, files that get their names when they are complete, and
sample files of a workflow engine without overwriting anything."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError

_ROOT = Path(__file__).parents[2]


def read_samples(package: str, source: str) -> dict[str, str]:
    """Return the texts of sample files by name.

    Args:
        package: Path of `__init__.py` of the package that also has the samples if shoal was installed from a wheel.
        source: Folder of the repository that has them otherwise.
    """
    for folder in (Path(package).parent, _ROOT / source):
        files = [each for each in sorted(folder.glob("*.*")) if each.name != "__init__.py"]
        if files:
            break
    return {each.name: each.read_text() for each in files}


def write_samples(folder: Path, samples: Mapping[str, str]) -> list[Path]:
    """Write files to a folder, and return the paths of those that did not exist. A file that already has the same
    content is left as it is.

    Args:
        folder: The folder, which is created if it does not exist.
        samples: Texts by name.
    """
    texts = {folder / name: text for name, text in samples.items()}
    try:
        missing = {path: text for path, text in texts.items() if not path.exists()}
        other = [str(path) for path in texts.keys() - missing.keys() if path.read_text() != texts[path]]
        if other:
            raise InvalidArgumentError(
                f"{' and '.join(sorted(other))} would be overwritten: rename or remove the existing files, or give "
                "another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in missing.items():
            path.write_text(text)
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError(f"{folder} cannot be used as a folder for the files: {error}") from None
    return list(missing)


SHARED_MODE = 0o775
"""Mode of a folder for results. With a umask of 0, too, not every user may write to it."""


def create_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a folder and its missing parents with the same mode. `Path.mkdir` creates parents with mode 0777."""
    if not folder.is_dir():
        create_folder(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)


@contextmanager
def complete_file(filesystem: Any, path: str, *, is_local: bool) -> Iterator[Any]:
    """Yield the stream of a file on a filesystem of Arrow. A local file gets its name when it is complete, and has a
    hidden name before. An object store cannot rename: a file there has its name from the start, also if the block is
    left by an exception, so its readers have to find out whether it is complete.
    """
    folder, _, name = path.rpartition("/")
    target = f"{folder}/.{name}.{uuid.uuid4().hex}" if is_local else path
    with filesystem.open_output_stream(target) as stream:
        yield stream
    if target != path:
        filesystem.move(target, path)
