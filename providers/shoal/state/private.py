"""Folders that other users of the machine can neither enter nor replace, checked before each use."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def why_not_mine(folder: Path) -> str | None:
    """Say why another user could have a hand in a folder.

    Args:
        folder: An absolute path.

    Returns:
        The reason, to follow the folder's name in a sentence; None for a real folder of the calling user, in which and
        above which no other user can put anything else in its place.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
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
    """Say why another user could enter a folder or have a hand in it; None where none can (see `why_not_mine`)."""
    if why := why_not_mine(folder):
        return why
    mode = stat.S_IMODE(folder.lstat().st_mode)
    return f"has mode {mode:04o}: other users can enter it" if mode & 0o077 else None


def why_replaceable(folder: Path) -> str | None:
    """Say why another user could rename or remove what the calling user makes in a folder.

    Args:
        folder: An absolute path.

    Returns:
        The reason, to follow the folder's name in a sentence; None where no other user can. A folder that all may write
        to is safe when it has the sticky bit, as /tmp has.
    """
    trusted = (0, os.geteuid())
    for link in (folder, *folder.parents):
        if link.is_symlink() and link.lstat().st_uid not in trusted:
            return f"is reached by the symlink {link} of user {link.lstat().st_uid}"
    for above in dict.fromkeys((folder, *folder.parents, folder.resolve(), *folder.resolve().parents)):
        try:
            found = above.stat()
        except OSError as error:
            return f"cannot be looked at ({error.strerror}: {above})"
        named = "" if above == folder else f"lies in {above}, which "
        if found.st_uid not in trusted and not _is_unmapped(found.st_uid):
            return f"{named}belongs to user {found.st_uid}"
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"{named}has mode {stat.S_IMODE(found.st_mode):04o}: other users can replace what lies in it"
    return None


def remove_folder(folder: Path) -> bool:
    """Remove a folder with all that is in it, never through a symlink.

    Args:
        folder: A folder whose parent passed `why_not_mine`.

    Returns:
        Whether the path is free now; a symlink or a folder of another user stays.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)  # follows no link, neither in the folder nor in its place
    return not os.path.lexists(folder)


def _is_unmapped(uid: int) -> bool:
    """Whether no user of this user namespace has the id: it is shown for the host's root, who owns /tmp there."""
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return not any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
