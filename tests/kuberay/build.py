"""Build the programs of the control plane from their Go modules: `python -m tests.kuberay.build`.

The results lie outside the repository, in a folder per state of `modules/`. The first build takes about 20 minutes on
2 CPUs, and 6 GB in Go's own caches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).with_name("modules")
GO_AT_LEAST = (1, 26)


@dataclass(frozen=True)
class Program:
    """A program of the control plane, and the package of its module that is built."""

    name: str
    module: str
    package: str = "."
    flags: str = "-s -w"
    """Flags of the linker."""

    def path(self) -> Path:
        """Where it lies when it is built: another path after each change of its module."""
        digest = hashlib.sha256(f"{self.package} {self.flags}".encode())
        for file in sorted((MODULES / self.module).iterdir()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return _cache() / f"{self.module}-{digest.hexdigest()[:16]}" / self.name


ETCD = Program("etcd", "etcd")
_VERSION = re.findall(r"k8s\.io/kubernetes (v[\d.]+)", (MODULES / "kubernetes" / "go.mod").read_text())[0]
# Kueue asks the API server for its version.
KUBERNETES = Program("kubernetes", "kubernetes", flags=f"-s -w -X k8s.io/component-base/version.gitVersion={_VERSION}")
OPERATOR_MODULE = "github.com/ray-project/kuberay/ray-operator"
OPERATOR = Program("ray-operator", "operator", OPERATOR_MODULE)
KUEUE_MODULE = "sigs.k8s.io/kueue"
KUEUE = Program("kueue", "kueue", f"{KUEUE_MODULE}/cmd/kueue")
PROGRAMS = (ETCD, OPERATOR, KUBERNETES, KUEUE)

CRDS = {OPERATOR: (OPERATOR_MODULE, "config/crd/bases"), KUEUE: (KUEUE_MODULE, "config/components/crd/bases")}
"""Module and folder of the resource types of a program."""


class GoMissing(Exception):
    """There is no Go that could build the programs; the message says what to do."""


def missing() -> str | None:
    """Why there is no control plane yet; None if all programs are built."""
    unbuilt = [program.name for program in PROGRAMS if not program.path().exists()]
    if not unbuilt:
        return None
    return f"not built yet: {', '.join(unbuilt)}. `make test-kuberay` builds what is missing, which needs Go"


def crds(program: Program) -> list[Path]:
    """The files with a program's resource types."""
    return sorted(program.path().with_name("crds").glob("*.yaml"))


def build_missing() -> None:
    """Build what is missing, one program at a time and at low priority.

    Raises:
        GoMissing: there is no Go, or it is too old.
        RuntimeError: a build failed; the message has the output of the compiler.
    """
    if missing() is None:
        return
    _check_go()
    _cache().mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        target = program.path()
        with (_cache() / f"{program.module}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                continue
            _build(program, target)


def _build(program: Program, target: Path) -> None:
    print(f"Building {program.name} into {target.parent}", flush=True)
    began = time.monotonic()
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    linked = ("-trimpath", "-ldflags", program.flags, "-o", str(unfinished))
    done = _go(
        "build", "-p", str(os.cpu_count()), *linked, program.package, folder=MODULES / program.module, check=False
    )
    if done.returncode:
        raise RuntimeError(f"go build of {program.name} failed:\n{done.stderr[-4000:]}")
    if program in CRDS:
        module, folder = CRDS[program]
        source = _go("list", "-m", "-f", "{{.Dir}}", module, folder=MODULES / program.module).stdout.strip()
        target.with_name("crds").mkdir(exist_ok=True)
        for file in (Path(source) / folder).glob("*.yaml"):
            shutil.copyfile(file, target.with_name("crds") / file.name)
    unfinished.rename(target)
    print(f"Built {program.name} in {time.monotonic() - began:.0f} s", flush=True)
    for older in _cache().glob(f"{program.module}-*"):
        if older != target.parent:
            shutil.rmtree(older, ignore_errors=True)


def _check_go() -> None:
    wanted = ".".join(map(str, GO_AT_LEAST))
    if (go := _go_command()) is None:
        raise GoMissing(
            f"there is no `go` command. Install Go {wanted} or newer (https://go.dev/dl), or set SHOAL_TEST_KUBECONFIG "
            "to the kubeconfig of a cluster that has the KubeRay operator"
        )
    said = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"go(\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < GO_AT_LEAST:
        raise GoMissing(
            f"Go {wanted} or newer is needed, and {go} is {said.strip()!r}: install it from https://go.dev/dl"
        )


def _go_command() -> str | None:
    return shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")


def _go(*arguments: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["nice", "-n", "15", _go_command() or "go", *arguments]
    # A C compiler is not needed: all of this is Go.
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=check)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal-kuberay"


if __name__ == "__main__":
    try:
        build_missing()
    except GoMissing as error:
        print(f"The tests on Kubernetes are skipped: {error}")
