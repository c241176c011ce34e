"""Files of shoal in folders to which other users can write: never through a link, never a wait for a FIFO."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.errors import InvalidArgumentError
from shoal.jobs.files import artifacts, storage
from shoal.kinds.prediction.output_files import Output
from shoal.training import locations
from shoal.training.locations import MARKER, Claim
from shoal.training.pytorch.checkpoints import Checkpoints, Destination, upload

MINE = Claim("job", "me", 1)
STRANGER, OTHER_NODE = 65534, 65533

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@pytest.fixture
def victims(tmp_path: Path) -> Path:
    file = tmp_path / "home" / ".bashrc"
    file.parent.mkdir()
    file.write_text("precious")
    return file


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder to which every user can write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def file_uri(path: Path) -> str:
    return path.as_uri()


@pytest.mark.parametrize("location", [str, file_uri])
def test_a_marker_never_goes_through_a_link(shared: Path, victims: Path, location: Callable[[Path], str]):
    folder = shared / "job" / "1"
    folder.mkdir(parents=True)
    (folder / MARKER).symlink_to(victims)

    artifacts.check(location(folder), MINE, str(shared))
    artifacts.mark(location(folder), MINE)

    assert victims.read_text() == "precious"
    assert MINE.has_marked(str(folder)) and not (folder / MARKER).is_symlink()


def test_files_and_uploads_never_go_through_a_link(shared: Path, victims: Path):
    folder, source = shared / "job", shared / "source"
    folder.mkdir()
    source.mkdir()
    for name in ("results.pkl", "model.pt"):
        (folder / name).symlink_to(victims)
    (source / "model.pt").write_text("weights")

    storage.write(str(folder / "results.pkl"), b"results")
    upload(source, ["model.pt"], str(folder))

    assert victims.read_text() == "precious"
    assert storage.read(str(folder / "results.pkl")) == b"results"
    assert storage.read(str(folder / "model.pt")) == b"weights"


def test_a_file_that_the_disk_has_no_room_for_leaves_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locations.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.write(str(shared / "job" / "model.ubj"), b"half")
    assert list((shared / "job").iterdir()) == []


@pytest.mark.parametrize("file", [MARKER, "results.pkl", "training.json"])
def test_a_fifo_is_neither_waited_for_nor_written_to(shared: Path, file: str):
    folder = shared / "job" / "1"
    folder.mkdir(parents=True)
    os.mkfifo(folder / file)

    assert locations.read_claim(str(folder)) is None
    artifacts.discard_unfinished(str(folder), MINE)
    with pytest.raises(FileNotFoundError, match="No regular file"):
        storage.read(str(folder / file))
    storage.write(str(folder / file), b"{}")
    assert storage.read(str(folder / file)) == b"{}"


def job_files(shared: Path) -> None:
    artifacts.check(artifacts.folder(_key(), str(shared)), MINE, str(shared))


def model_folder(shared: Path) -> None:
    Destination(str(shared), MINE, lambda: True).check()


def checkpoint(shared: Path) -> None:
    pytest.importorskip("torch")
    Checkpoints(str(shared / "checkpoints" / "job"), b"key").save({})


def predictions(shared: Path) -> None:
    Output(str(shared / "predictions"), MINE).prepare()


def _key() -> artifacts.Key:
    return artifacts.Key("job", 1)


WAYS = [
    (job_files, "job"),
    (job_files, "job/1"),
    (model_folder, "model"),
    (model_folder, "model/.job.1.partial"),
    (checkpoint, "checkpoints/job"),
    (predictions, ".predictions.job.1.partial"),
]


@pytest.mark.parametrize(("use", "link"), WAYS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_folder_that_is_a_link_is_refused(shared: Path, victims: Path, use: Callable[[Path], None], link: str):
    (shared / link).parent.mkdir(parents=True, exist_ok=True)
    (shared / link).symlink_to(victims.parent)

    with pytest.raises(InvalidArgumentError, match="is a file or a link"):
        use(shared)

    assert [path.name for path in victims.parent.iterdir()] == [".bashrc"]


def test_a_folder_that_every_user_can_change_is_refused(shared: Path):
    (shared / "job").mkdir()
    (shared / "job").chmod(0o777)
    with pytest.raises(InvalidArgumentError, match=r"shared/job has mode 0777: every user can .*chmod o-w "):
        job_files(shared)


def test_a_file_system_that_shows_all_files_as_writable_is_accepted(shared: Path, monkeypatch: pytest.MonkeyPatch):
    def cifs(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result((found.st_mode | 0o777, *found[1:]))

    real = os.fstat
    monkeypatch.setattr(locations.os, "fstat", cifs)
    (shared / "job").mkdir()
    job_files(shared)


def test_with_no_umask_others_cannot_change_new_folders_and_files(shared: Path):
    before = os.umask(0)
    try:
        artifacts.mark(str(shared / "job" / "1"), MINE)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (shared / "job", shared / "job/1", shared / "job/1" / MARKER)]
    assert modes == [0o775, 0o775, 0o664]


@contextmanager
def user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def location() -> Iterator[Path]:
    """A folder that other users can reach, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
@pytest.mark.parametrize("folder", ["job", "job/1"])
def test_a_folder_of_a_stranger_is_refused_where_every_user_can_write(location: Path, folder: str):
    location.chmod(0o1777)
    (location / folder).mkdir(parents=True)
    os.chown(location / folder, STRANGER, -1)
    with pytest.raises(InvalidArgumentError, match=rf"{folder} belongs to user {STRANGER}, and every user can write"):
        job_files(location)


@needs_root
def test_nodes_with_other_users_share_a_location_to_which_not_every_user_can_write(location: Path):
    """The driver and a node have users of one group, and neither made the location."""
    location.chmod(0o2775)
    destination = Destination(str(location), MINE, lambda: True)
    (location / "source").mkdir()
    (location / "source" / "model.pt").write_text("weights")
    before = os.umask(0o002)
    try:
        with user(STRANGER):  # its group is 0, as that of the location and of the other node
            destination.check()
            destination.prepare()
        with user(OTHER_NODE):
            upload(location / "source", ["model.pt"], destination.staging)
        with user(STRANGER):
            path = destination.commit(["model.pt"])
        with user(OTHER_NODE):
            later = Destination(str(location), Claim("job", "me", 2), lambda: True)
            later.check()
            later.prepare()
            later.commit([])
    finally:
        os.umask(before)
    assert [file.name for file in Path(path).iterdir()] == [MARKER]


@needs_root
def test_a_file_system_that_shows_one_user_for_all_is_accepted(location: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS with all_squash: also the files of this process belong to the anonymous user."""
    location.chmod(0o777)
    (location / "job").mkdir()
    os.chown(location / "job", STRANGER, -1)

    def squashed(dir: str) -> object:
        file = tempfile.NamedTemporaryFile(dir=dir)  # noqa: SIM115
        os.chown(file.name, STRANGER, -1)
        return file

    monkeypatch.setattr(locations.tempfile, "TemporaryFile", squashed)
    job_files(location)
