"""Build everything that a release publishes into `dist/`, and check it: `make dist`.

The wheel and the source distribution are built from the last commit, with its time, so a second build has the same
bytes. Beside them lie the site, a list of components for each extra and each image (CycloneDX), the licences, the
result of the audit, and SHA256SUMS. The list of an image has its Python packages, and not those of Debian.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.benchmarks.__main__ import PAGE, stale_tables
from tests.support import ROOT
from tests.support.dockerfile import installs, stages

DIST = ROOT / "dist"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESSES = ("Documentation", "Changelog", "Source", "Issues")
_UNKNOWN_LICENCE = "not installed here"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build what a release publishes.")
    parser.add_argument("--draft", action="store_true", help="also while an address is unset or a benchmark is stale")
    parser.add_argument("--tools", type=Path, required=True, help="bin folder of the environment with the tools")
    parser.add_argument("--site", type=Path, required=True, help="folder of the site that `make docs` has made")
    args = parser.parse_args()
    if missing := _missing():
        print("\n".join(missing), file=sys.stderr)
        if not args.draft:
            return 1
    if changed := _output("git", "status", "--porcelain"):
        print(
            f"commit or remove these first, because a release is built from the last commit:\n{changed}",
            file=sys.stderr,
        )
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    stamp = _output("git", "log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as folder:
        _export(Path(folder))
        _run("uv", "build", "--quiet", "--no-create-gitignore", "--out-dir", str(DIST), folder, SOURCE_DATE_EPOCH=stamp)
    built = [str(path) for path in sorted(DIST.iterdir())]
    _run(str(args.tools / "twine"), "check", "--strict", *built)
    wheels = [path for path in built if path.endswith(".whl")]
    _run(str(args.tools / "check-wheel-contents"), "--ignore", "W004", *wheels)  # migrations have no importable names
    _zip(args.site, DIST / f"{PROJECT['name']}-{PROJECT['version']}-docs.zip")
    for extra in sorted(PROJECT["optional-dependencies"]):
        _components(extra, _pins(extra), args.tools, stamp)
    for name, stage in stages().items():
        if installed := installs(stage):
            _components(f"image-{name.removesuffix('-env')}", _pins_of_image(installed), args.tools, stamp)
    (DIST / "LICENCES.txt").write_text(_licences())
    (DIST / "AUDIT.txt").write_text(_audit(args.tools))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(sums))
    return 0


def _missing() -> list[str]:
    """Return what a release needs and a draft does not, a sentence each."""
    unset = [label for label in ADDRESSES if label not in PROJECT["urls"]]
    said = [f"pyproject.toml has no address {', '.join(unset)} in [project.urls]"] if unset else []
    return said + [
        f"{PAGE}: the table {name} was not measured on this code. Run make bench ONLY={name} WRITE=1"
        for name in stale_tables()
    ]


def _run(*command: str, **environment: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **environment})


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _export(folder: Path) -> None:
    """Write the files of the last commit into a folder."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        with tarfile.open(fileobj=file) as found:
            found.extractall(folder, filter="data")


def _zip(folder: Path, target: Path) -> None:
    """Pack a folder so that the same files give the same bytes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and ".doctrees" not in path.parts:
                entry = zipfile.ZipInfo(str(path.relative_to(folder)))
                entry.external_attr = 0o644 << 16
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


def _pins(extras: str, packages: str = "", *constraints: str) -> str:
    """Return what extras (with commas) and further packages (a line each) install today, with versions."""
    options = [f"--constraint={file}" for file in constraints]
    if extras:
        options += ["pyproject.toml", *(f"--extra={extra}" for extra in extras.split(","))]
    return subprocess.run(
        ["uv", "pip", "compile", "--quiet", "--python-version", "3.11", "--no-header", "--no-annotate",
         "--no-emit-index-url", "--no-emit-find-links", *options, "-"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, input=packages,
    ).stdout  # fmt: skip


def _pins_of_image(installed: Sequence[Sequence[str]]) -> str:
    """Return what an image installs: as in `docker/bin/install`, the first of its installations that is possible."""
    (pins, extras, *packages), *others = installed
    try:
        return _pins(extras, "\n".join(packages), f"requirements/{pins}.txt", "requirements/stack.txt")
    except subprocess.CalledProcessError:
        if not others:
            raise
        print(f"{packages} cannot be installed here: the Dockerfile then installs {others[0]}", file=sys.stderr)
        return _pins_of_image(others)


def _components(name: str, pins: str, tools: Path, stamp: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        target = str(DIST / f"{PROJECT['name']}-{PROJECT['version']}-{name}.cdx.json")
        _run(str(tools / "cyclonedx-py"), "requirements", "--output-reproducible", "--pyproject", "pyproject.toml",
             "--output-file", target, file.name, SOURCE_DATE_EPOCH=stamp, PYTHONWARNINGS="ignore")  # fmt: skip


def _licences() -> str:
    """The licence of each package of the extra `all`, as far as it is installed beside this program."""
    names = [line.partition("==")[0] for line in _pins("all").splitlines() if "==" in line]
    return "".join(f"{name}: {_licence(name)}\n" for name in sorted(names))


def _licence(name: str) -> str:
    try:
        found = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return _UNKNOWN_LICENCE
    classifiers: Iterable[str] = found.get_all("Classifier") or []
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    text = found.get("License-Expression") or ", ".join(named) or found.get("License") or "not named"
    return text.strip().splitlines()[0]


def _audit(tools: Path) -> str:
    """What is known of vulnerabilities. Behind a mirror of an index, pip-audit skips packages and still succeeds."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(_pins("all"))
        file.flush()
        options = ["--strict", "--no-deps", "--disable-pip", "--format", "json", "-r", file.name]
        command = [str(tools / "pip-audit"), *options]
        ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    try:
        packages = json.loads(ran.stdout)["dependencies"]
    except ValueError:
        return f"not audited: {(ran.stderr.strip().splitlines() or ['no answer'])[-1]}\n"
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    if skipped:
        return f"not audited: {len(skipped)} of {len(packages)} packages were skipped\n"
    lines = [f"{each['name']} {each['version']}: {each['vulns'] or 'nothing known'}" for each in packages]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
