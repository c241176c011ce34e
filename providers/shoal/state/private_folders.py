"""Check that other users of the machine cannot enter or replace a folder or the store's file; remove folders safely."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from pathlib import Path

from shoal.errors import StoreError

log = logging.getLogger("shoal.home")

_BESIDE = ("", "-wal", "-shm", "-journal")
"""Suffixes of the names of the files of a SQLite database. SQLite trusts the files beside the database: a WAL that
another user has put there would change its content."""


def why_not_mine(folder: Path) -> str | None:
    """Return the reason why another user could change or replace a folder, or None if no other user can.

    Returns:
        The reason as words to put after the folder's name, such as "is a symlink". None if the path is a real folder
        that belongs to the calling user, and no other user can write to it or replace it.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        return f"cannot be checked ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return "is a symlink"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o022:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}: other users can write to it"
    return why_replaceable(folder.parent)


def why_not_private(folder: Path) -> str | None:
    """Return the reason why another user could enter, change or replace a folder, or None if no other user can.

    The reason is words to put after the folder's name, as for `why_not_mine`.
    """
    if why := why_not_mine(folder):
        return why
    mode = stat.S_IMODE(folder.lstat().st_mode)
    return f"has mode {mode:04o}: other users can enter it" if mode & 0o077 else None


def why_replaceable(folder: Path) -> str | None:
    """Return the reason why another user could rename or remove this user's files in a folder, or None if no other
    user can.

    Returns:
        The reason as words to put after the folder's name, such as "belongs to user 1001". None if no other user can
        rename or remove the files. A folder to which all users may write is safe if it has the sticky bit, like /tmp.
    """
    trusted = (0, os.geteuid())
    for link in (folder, *folder.parents):
        if link.is_symlink() and link.lstat().st_uid not in trusted:
            return f"is reached by the symlink {link} of user {link.lstat().st_uid}"
    for above in dict.fromkeys((folder, *folder.parents, folder.resolve(), *folder.resolve().parents)):
        try:
            found = above.stat()
        except OSError as error:
            return f"cannot be checked ({error.strerror}: {above})"
        named = "" if above == folder else f"lies in {above}, which "
        if found.st_uid not in trusted and not _is_unmapped(found.st_uid):
            return f"{named}belongs to user {found.st_uid}"
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"{named}has mode {stat.S_IMODE(found.st_mode):04o}: other users can replace files in it"
    return None


def remove_folder(folder: Path) -> bool:
    """Remove a folder and its contents, without following symlinks."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        # rmtree never follows a symlink, so nothing outside the folder is removed.
        shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def make_file(file: Path) -> None:
    """Create an empty file with mode 0600, if the file does not exist and can be created.

    SQLite gives the files beside its database the mode of the database. By default this would be 0644.
    """
    with contextlib.suppress(OSError):  # SQLite reports a file that cannot be created
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def keep_file_private(file: Path) -> None:
    """Check that only this user can change the file of a SQLite store, and set its mode to 0600.

    Raises:
        StoreError: Another user may have changed or can replace the file, or its mode cannot be changed.
    """
    is_in_private_folder = why_folder_is_open(file.parent) is None
    if not is_in_private_folder and (why := _why_store_is_unsafe(file)):
        raise StoreError(
            f"the state store {file} {why}. Set SHOAL_STATE_URL to a file in a folder that belongs to you and to which "
            "no other user can write, or unset it to use $SHOAL_HOME"
        )
    for name in _BESIDE:
        found = Path(f"{file}{name}")
        try:
            owner, mode = found.stat().st_uid, stat.S_IMODE(found.stat().st_mode)
        except OSError:
            continue
        if not _is_trusted(owner):
            raise StoreError(
                f"{found} belongs to user {owner}, who can change it: move the file away, or set SHOAL_STATE_URL to a "
                "file that belongs to you"
            )
        if mode & 0o002 and not is_in_private_folder:
            raise StoreError(
                f"{found} has mode {mode:04o}: any user may have changed it. Check its contents and run "
                f"`chmod 600 {found}`"
            )
        if mode & 0o077 and owner == os.geteuid():
            try:
                found.chmod(0o600)
            except FileNotFoundError:
                continue  # the last connection of another process was closed, and SQLite has removed the file
            except OSError as error:
                raise StoreError(
                    f"{found} has mode {mode:04o}, and changing it to 0600 failed: {error}. Set SHOAL_STATE_URL to "
                    "another file"
                ) from error
            if not is_in_private_folder:
                log.warning("%s had mode %04o, so other users could read it: its mode is now 0600", found, mode)


def why_folder_is_open(folder: Path) -> str | None:
    """Return the reason why another user could enter a folder (a link is followed), or None if no other user can."""
    try:
        found = folder.stat()
    except OSError as error:
        return f"cannot be checked ({error.strerror})"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"has mode {mode:04o}: other users can enter it" if mode & 0o077 else None


def _why_store_is_unsafe(file: Path) -> str | None:
    """Return the reason why another user could replace a file or put files beside it, as words to put after its path.

    In a folder with the sticky bit, another user cannot replace the file, but can put a WAL beside it.
    """
    for link in (file, *file.parents):
        if link.is_symlink() and not _is_trusted(owner := link.lstat().st_uid):
            return f"is reached by the symlink {link} of user {owner}"
    for place in dict.fromkeys((file.parent, file.resolve().parent)):
        for folder in (place, *place.parents):
            try:
                found = folder.stat()
            except OSError:
                continue  # SQLite reports a folder that is missing
            mode = stat.S_IMODE(found.st_mode)
            if folder == place and not _is_trusted(found.st_uid):
                return f"lies in {folder}, which belongs to user {found.st_uid}"
            if mode & 0o002 and (folder == place or not mode & stat.S_ISVTX):
                return f"lies in {folder}, which has mode {mode:04o}: any user can put files there"
    return None


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid()) or _is_unmapped(uid)


def _is_unmapped(uid: int) -> bool:
    """Return whether a user id belongs to no user of this user namespace (the set of users that a container can see).

    In a rootless container, files that belong to the host's root, such as /tmp, are shown with such an id.
    """
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return not any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
