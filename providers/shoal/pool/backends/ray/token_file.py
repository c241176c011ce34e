"""Find and write the token file of a pool's Ray cluster, and find its file of trusted certificates.

The store contains only the paths of these files. The reconciler and the drivers of jobs read the token from the file.
"""

from __future__ import annotations

from pathlib import Path

from shoal.errors import InvalidArgumentError
from shoal.pool.spec import PoolSpec
from shoal.state.home import home, store_tag, subfolder, write_file


def token_path(spec: PoolSpec) -> Path | None:
    """Return the path of the pool's token file; None if the pool's Ray cluster needs no token.

    A relative path is relative to ``$SHOAL_HOME``, so that hosts with different home folders can share a pool.
    """
    return home() / Path(spec.token_file).expanduser() if spec.token_file else None


def ca_path(spec: PoolSpec) -> Path | None:
    """Return the path of the pool's file with trusted certificates; None if the pool has no such file.

    A relative path is relative to ``$SHOAL_HOME``.
    """
    return home() / Path(spec.ca_file).expanduser() if spec.ca_file else None


def with_token(spec: PoolSpec, token: str) -> PoolSpec:
    """Write the token of a pool's cluster to a file, and return the spec with the path of this file.

    Raises:
        StoreError: The file cannot be written.
    """
    return PoolSpec.parse({**spec.model_dump(), "token_file": keep_token(spec.name, token)})


def check_token(spec: PoolSpec, owner: str, field: str) -> None:
    """Check that a pool may have a token that is not in a file.

    Args:
        spec: Spec of the pool.
        owner: Object that contains the token, for the message.
        field: Name of the token in this object, for the message.

    Raises:
        InvalidArgumentError: The pool is no ray:// pool, or already has a token file.
    """
    if spec.backend != "ray":
        raise InvalidArgumentError(
            f"{owner} has a {field}, which is allowed only for ray:// pools, as the token of the Ray cluster: remove "
            f"the {field}, because a {spec.backend}:// pool creates its own tokens"
        )
    if spec.token_file is not None:
        raise InvalidArgumentError(
            f"{owner} has a {field} and the option token_file: use only one of them as the token"
        )


def keep_token(pool: str, token: str) -> str:
    """Write the token of a pool's cluster to a file (mode 0600) in ``$SHOAL_HOME``.

    If the file contains another token, the file is replaced. So after a change of the token, call this function again.

    Raises:
        StoreError: The file cannot be written.
    """
    path = subfolder(_folder()) / pool
    if not (path.is_file() and path.read_text() == token):
        write_file(path, token)
    return f"{_folder()}/{pool}"


def kept_token(pool: str) -> str:
    """Return the token in the file that `keep_token` has written; empty if there is no such file."""
    try:
        return (home() / _folder() / pool).read_text().strip()
    except FileNotFoundError:
        return ""


def remove_token(pool: str) -> None:
    """Remove the file that `keep_token` has written, if there is one."""
    (home() / _folder() / pool).unlink(missing_ok=True)


def _folder() -> str:
    """Return the name of the folder for token files in ``$SHOAL_HOME``. Each store has its own folder."""
    return f"tokens{store_tag()}"
