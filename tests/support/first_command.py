"""Measure the README's first command as a new user runs it: from the clone to the champion, in a new Debian 12.

The Debian has only what the README asks for. `python -m tests.support.first_command` needs root and debootstrap, and
writes the figures to which a test holds the README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import ROOT

FIGURES = Path(__file__).with_suffix(".json")
PACKAGES = "python3,python3-venv,make,git,ca-certificates"
_CLONE = "root/clone"
_MB = 1_000_000
_INDEX_VARIABLES = re.compile(r"(PIP|UV|SSL)_(?!FIND_LINKS).*|(HTTPS?|NO)_PROXY", re.IGNORECASE)
"""Names of the variables by which pip and uv find this machine's package index."""
_MACHINES_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
# The mounts and the processes end with these namespaces.
_ENTER = """mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" sh -c "$1" """


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure `make run` and `make install` in a new Debian 12.")
    parser.add_argument("--only-run", action="store_true", help="do not measure `make install`, and write nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-command-") as folder:
        debian = Path(folder)
        # debootstrap mounts /proc: its own namespace unmounts it even after an error.
        options = ["--variant=minbase", f"--include={PACKAGES}"]
        command = ["unshare", "--mount", "debootstrap", *options, "bookworm", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for file in _MACHINES_FILES:
            if os.path.exists(file):
                shutil.copy(file, debian / file[1:])
        figures = {
            "date": str(datetime.date.today()),
            "commit": _output("git", "rev-parse", "--short", "HEAD"),
            "machine": f"{os.cpu_count()} CPUs ({platform.machine()})",
            "load_before": round(os.getloadavg()[0], 2),
            "make run": _measured(debian, "make run", clone=True),
        }
        if not args.only_run:
            figures["make install"] = _measured(debian, "make install")
            FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    return 0


def _measured(debian: Path, command: str, clone: bool = False) -> dict[str, int]:
    """Run a command in the clone, and return its seconds, and the megabytes since the Debian was new."""
    began = time.monotonic()
    if clone:
        subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(debian / _CLONE)], check=True)
    _inside(debian, command)
    seconds = time.monotonic() - began
    on_disk = _bytes_on_disk(debian / "root")
    # uv does not keep the wheels that it downloads, so pip downloads the same ones again.
    _inside(
        debian,
        ".venv/bin/pip freeze --exclude-editable > /wheels.txt && "
        ".venv/bin/pip download --quiet --no-cache-dir --no-deps --dest /wheels -r /wheels.txt",
    )
    downloaded = _bytes_on_disk(debian / "wheels")
    shutil.rmtree(debian / "wheels")
    return {"seconds": round(seconds), "downloaded_mb": downloaded // _MB, "on_disk_mb": on_disk // _MB}


def _inside(debian: Path, command: str) -> None:
    """Run a command in the clone, in a new home, with the machine's package index and nothing else of the caller's."""
    kept = [f"{name}={value}" for name, value in os.environ.items() if _INDEX_VARIABLES.fullmatch(name)]
    environment = ["env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", *kept]
    entered = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER]
    subprocess.run([*environment, *entered, str(debian), f"cd /{_CLONE} && {command}"], check=True)


def _bytes_on_disk(folder: Path) -> int:
    """Return the bytes that a folder takes, and count a file with several names once, as uv's cache has them."""
    return int(_output("du", "--summarize", "--block-size=1", str(folder)).split()[0])


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
