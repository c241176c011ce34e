"""Processes on the hosts of a test (`network_hosts`) as users of their own, and an environment without Ray for them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.network_hosts import Host

_WITHOUT_RAY = ("moto[server,s3]",)
_EXTRAS = "airflow,data,postgres,s3"

# The interpreter may be in a folder that only root can enter, such as /root. The namespace gets an empty folder in its
# place, which has only the interpreter.
_ENTER = """
set -e
closed=$1; base=$2; user=$3; shift 3
if [ -n "$closed" ]; then
    mount --bind "$base" /mnt
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    mkdir -p "$base"
    mount --bind /mnt "$base"
fi
exec setpriv --reuid="$user" --regid="$user" --clear-groups "$@"
"""


@dataclass(frozen=True)
class User:
    """A user on one host, with a home that nobody else can enter."""

    host: Host
    uid: int
    home: Path

    @classmethod
    def new(cls, host: Host, uid: int, home: Path) -> User:
        """Make the home of a new user."""
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        return cls(host, uid, home)

    def file(self, name: str, content: str) -> Path:
        """Write a file into the home, readable for the user alone."""
        path = self.home / name
        path.touch(mode=0o600)
        path.write_text(content)
        os.chown(path, self.uid, self.uid)
        return path

    def popen(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process of the user. It is the first of a session of its own."""
        closed = _closed(Path(sys.base_prefix))
        enter = ["ip", "netns", "exec", self.host.namespace, "sh", "-c", _ENTER, "sh", closed, sys.base_prefix]
        path = [str(Path(command[0]).parent), f"{sys.base_prefix}/bin", "/usr/bin", "/bin", "/usr/sbin"]
        name = f"user{self.uid}"  # Airflow wants one, and the system has none for this id
        own = {
            "HOME": str(self.home),
            "LOGNAME": name,
            "PATH": os.pathsep.join(path),
            "LC_ALL": "C.UTF-8",
            **environment,
        }
        return subprocess.Popen(
            [*enter, str(self.uid), *command], env=own, cwd=self.home, start_new_session=True, **options
        )


def without_ray() -> Path:
    """Return the Python of an environment with this shoal, but without Ray and training libraries.

    It is made once for each list of requirements, outside of the repository.
    """
    pins = ROOT / "requirements" / "dev.txt"
    made_of = (ROOT / "pyproject.toml").read_text() + pins.read_text() + f"{ROOT} {_EXTRAS}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    folder = Path("/var/tmp") / f"shoal-without-ray-{os.getuid()}-{digest[:16]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, folder], check=True)
        packages = ["--editable", f"{ROOT}[{_EXTRAS}]", *_WITHOUT_RAY]
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, "-c", pins, *packages], check=True)
        (folder / "complete").touch()
    return python


def _closed(path: Path) -> str:
    """Return the first folder on the way to a path that other users cannot enter; empty if there is none."""
    way = [*reversed(path.parents), path]
    return next((str(folder) for folder in way if not folder.stat().st_mode & 0o001), "")
