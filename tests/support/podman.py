"""Containers in tests: whether podman works here, and its settings where there is no systemd."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

BASE = "localhost/debian:bookworm-slim"


def settings(folder: Path) -> dict[str, str]:
    """Return the variables with which podman works in a sandbox: an installed runtime, and limits that it may set.

    Args:
        folder: Where to write podman's configuration. One that the caller's environment names is kept.
    """
    if "CONTAINERS_CONF" in os.environ:
        return {}
    limits = ", ".join(
        f'"{name}={hard}:{hard}"'
        for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
        for hard in [min(resource.getrlimit(kind)[1] % 2**63, 32768)]
    )
    runtimes = ["crun", "runc"]
    if Path("/sys/fs/cgroup/unified").exists():  # crun refuses a system that has both versions of cgroups
        runtimes.reverse()
    runtime = next((name for name in runtimes if shutil.which(name)), "runc")
    file = folder / "containers.conf"
    file.write_text(f'[engine]\nruntime = "{runtime}"\n[containers]\ndefault_ulimits = [{limits}]\n')
    return {"CONTAINERS_CONF": str(file), "BUILDAH_ISOLATION": os.environ.get("BUILDAH_ISOLATION", "chroot")}


def refusal(environment: dict[str, str]) -> str | None:
    """Return why no container can be started here; None where one can.

    Args:
        environment: Variables of podman.
    """
    if shutil.which("podman") is None:
        return "podman is not installed"
    base = environment.get("BASE", BASE)
    if podman(environment, "image", "exists", base).returncode != 0:
        return f"there is no image {base}: `python docker/stack.py base` makes one from Debian's packages, as root"
    tried = podman(environment, "run", "--rm", base, "true")
    return None if tried.returncode == 0 else f"podman cannot start a container: {tried.stderr.strip()[-300:]}"


def podman(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run podman, and return its exit code and output."""
    return subprocess.run(["podman", *arguments], env=environment, capture_output=True, text=True)
