"""Check that other users of the machine cannot enter or replace a folder, and remove folders safely."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def why_not_mine(folder: Path) -> str | None:
    """Return the reason why another user could change or replace a folder, or None if no other user can.

    Args:
        folder: An absolute path.

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

    Args:
        folder: An absolute path.

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
    """Remove a folder and its contents, without following symlinks.

    Args:
        folder: The folder. Call `why_not_mine` for its parent first: the parent must be safe.

    Returns:
        True if the path no longer exists. A symlink or a folder of another user is not removed.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        # rmtree never follows a symlink, so nothing outside the folder is removed.
        shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def _is_unmapped(uid: int) -> bool:
    """Return whether a user id belongs to no user of this user namespace (the set of users that a container can see).

    In a rootless container, files that belong to the host's root, such as /tmp, are shown with such an id.
    """
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return not any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
