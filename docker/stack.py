"""Build, start and stop the services of ``compose.yaml``, for example with ``python docker/stack.py up``.

``up`` writes the secrets if there are none, builds the images, starts one service after the other and waits until each
service is healthy. The program uses Docker if ``docker compose`` works, else podman with podman-compose. With podman,
the program runs the health checks itself, because podman runs health checks only on machines with systemd.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
COMPOSE = FOLDER / "compose.yaml"
BASE = "docker.io/library/debian:bookworm-slim"
LOCAL_BASE = "localhost/debian:bookworm-slim"
ROLES = ("airflow", "mlflow", "prefect", "shoal", "shoal_node")
BUILD_DATE = 1735689600
"""Modification time of all files in the images, in seconds since the epoch. The time is fixed, so that the same input
always gives the same image."""
PATIENCE_S = 900
"""Longest time in seconds for which `up` waits for one service. On slow machines, Airflow's first start takes
minutes."""


class StackError(Exception):
    """The services cannot be built or started. The message contains the reason and a solution."""


def services(profiles: set[str]) -> dict[str, dict[str, Any]]:
    """Return the services of the compose file that the profiles select. Each service comes after the services that it
    needs."""
    every = yaml.safe_load(COMPOSE.read_text())["services"]
    chosen = {name: each for name, each in every.items() if set(each.get("profiles", [])) <= profiles}
    ordered: dict[str, dict[str, Any]] = {}

    def add(name: str) -> None:
        for needed in chosen[name].get("depends_on", {}):
            if needed not in ordered:
                add(needed)
        ordered[name] = chosen[name]

    for name in chosen:
        if name not in ordered:
            add(name)
    return ordered


def expanded(text: str) -> str:
    """Replace each ``${NAME:-default}`` in a text by the environment variable or, if the variable is not set, by the
    default."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: os.environ.get(found[1]) or found[2], text)


def secrets_folder() -> Path:
    """Return the folder of the secrets: ``$SECRETS`` if the variable is set, otherwise ``docker/secrets``."""
    return Path(os.environ.get("SECRETS") or FOLDER / "secrets").absolute()


def write_secrets(folder: Path) -> None:
    """Write a file for each secret of the compose file, unless the folder exists.

    The files can be read by all users, because the users in the containers have other ids than the user on the host.
    Only the owner can enter the folder.
    """
    if folder.exists():
        return
    passwords = {role: secrets.token_urlsafe(24) for role in ROLES}

    def pgpass(*roles: str) -> str:
        return "".join(
            f"postgresql:5432:{'shoal' if role == 'shoal_node' else role}:{role}:{passwords[role]}\n" for role in roles
        )

    key_id, key = f"AK{secrets.token_hex(9).upper()}", secrets.token_urlsafe(30)
    identity = {"name": "stack", "credentials": [{"accessKey": key_id, "secretKey": key}], "actions": ["Admin"]}
    files = {
        "airflow_api_secret": secrets.token_urlsafe(32),
        "airflow_fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "airflow_jwt_secret": secrets.token_urlsafe(48),
        "airflow_passwords": json.dumps({"admin": secrets.token_urlsafe(16)}),
        "pgpass_airflow": pgpass("airflow", "shoal"),
        "pgpass_mlflow": pgpass("mlflow"),
        "pgpass_node": pgpass("shoal_node"),
        "pgpass_prefect": pgpass("prefect", "shoal"),
        "postgres_roles": "".join(f"{role}:{password}\n" for role, password in passwords.items()),
        "ray_token": secrets.token_urlsafe(32),
        "s3_config": json.dumps({"identities": [identity]}),
        "s3_credentials": f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {key}\n",
    }
    # The folder gets its final name only when all files are written. So the next call repeats an interrupted call.
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    for name, text in files.items():
        (partial / name).write_text(text)
        (partial / name).chmod(0o444)
    partial.rename(folder)


def engine() -> str:
    """Return the command of the container engine: ``$ENGINE``, else the first of docker and podman that works.

    Raises:
        StackError: Neither docker nor podman works.
    """
    if chosen := os.environ.get("ENGINE"):
        return chosen
    if shutil.which("docker") and _works("docker", "compose", "version") and _works("docker", "info"):
        return "docker"
    if shutil.which("podman"):
        return "podman"
    raise StackError("neither `docker compose` nor podman works here: install one of them")


@contextlib.contextmanager
def build_inputs(environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield build options that pass on the caller's package index, certificates and folder of wheels.

    The values come from the environment variables of uv and pip. The URL of the index may contain a password. So the
    URL is passed as a build secret, which is not stored in the image.
    """
    index = environment.get("UV_DEFAULT_INDEX") or environment.get("PIP_INDEX_URL")
    extra = environment.get("UV_INDEX") or environment.get("PIP_EXTRA_INDEX_URL")
    certificates = environment.get("SSL_CERT_FILE") or environment.get("PIP_CERT")
    wheels = environment.get("UV_FIND_LINKS") or environment.get("PIP_FIND_LINKS")
    lines = [f"UV_DEFAULT_INDEX='{index}'\nPIP_INDEX_URL='{index}'\n"] if index else []
    lines += [f"UV_INDEX='{extra}'\nPIP_EXTRA_INDEX_URL='{extra}'\n"] if extra else []
    with tempfile.NamedTemporaryFile("w", prefix="index-") as file:
        file.write("".join(lines))
        file.flush()
        options = ["--secret", f"id=index,src={file.name}"]
        if certificates:
            options += ["--secret", f"id=ca,src={certificates}"]
        if wheels and Path(wheels).is_dir():
            options += ["--build-context", f"wheels={wheels}"]
        yield options


def build(profiles: set[str]) -> None:
    """Build the images of the services."""
    command = engine()
    origin = os.environ.get("BASE") or BASE
    if not _works(command, "image", "inspect", origin) and not _works(command, "pull", "--quiet", origin):
        raise StackError(
            f"the base image {origin} is not on this machine, and {command} cannot pull it: set BASE to an image of "
            f"Debian 12, or run `python docker/stack.py base` as root and set BASE={LOCAL_BASE}"
        )
    date = (
        ["--timestamp", str(BUILD_DATE)] if command == "podman" else ["--build-arg", f"SOURCE_DATE_EPOCH={BUILD_DATE}"]
    )
    images = {each["build"]["target"]: each["image"] for each in services(profiles).values() if "build" in each}
    with build_inputs(os.environ) as inputs:
        for target, image in images.items():
            started = time.monotonic()
            _run(
                *(command, "build", "--quiet", "--file", FOLDER / "Dockerfile", "--target", expanded(target)),
                *("--tag", expanded(image), "--build-arg", f"BASE={origin}"),
                *(*date, *inputs, FOLDER.parent),
                quiet=True,
            )
            _say(f"built {expanded(target)}", started)


def base(name: str) -> None:
    """Build a base image of Debian 12 with debootstrap, for machines that can reach Debian's packages but no image
    registry.

    Args:
        name: Name of the image, such as ``localhost/debian:bookworm-slim``.
    """
    with tempfile.TemporaryDirectory(prefix="base-") as folder:
        root = Path(folder) / "root"
        _run("debootstrap", "--variant=minbase", "bookworm", root, quiet=True)
        for path in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / path)
            (root / path / "partial").mkdir(parents=True)
        _run("tar", "--directory", root, "--create", "--file", Path(folder) / "root.tar", ".")
        _run(engine(), "import", Path(folder) / "root.tar", name, quiet=True)


def up(profiles: set[str]) -> None:
    """Write the secrets, build the images, and start each service after the services that it needs.

    Raises:
        StackError: A service ended or did not become healthy.
    """
    write_secrets(secrets_folder())
    build(profiles)
    command = engine()
    began = time.monotonic()
    if command == "docker":
        _run(*_compose(profiles), "up", "--detach", "--no-build", "--wait", "--wait-timeout", PATIENCE_S)
    else:
        for name, service in services(profiles).items():
            started = time.monotonic()
            _run(*_compose(profiles), "up", "--detach", "--no-build", "--no-deps", name, quiet=True)
            _wait(name, healthy=not service["healthcheck"].get("disable"))
            _say(f"{name} is up", started)
    _say("the stack is up", began)
    password = json.loads((secrets_folder() / "airflow_passwords").read_text())["admin"]
    print(f"Airflow: http://localhost:{os.environ.get('AIRFLOW_PORT', 8080)} (admin, {password})", flush=True)
    print(f"MLflow: http://localhost:{os.environ.get('MLFLOW_PORT', 5000)}", flush=True)


def down(profiles: set[str], *, everything: bool) -> None:
    """Remove the containers and the network of the stack.

    Args:
        profiles: Profiles of the compose file.
        everything: Whether to remove the volumes and the secrets, too. Both are removed together, because a database
            keeps the passwords with which it was created.
    """
    _run(*_compose(profiles), "down", *(["--volumes"] if everything else []))
    if everything and secrets_folder().is_dir():
        shutil.rmtree(secrets_folder())


def containers(service: str) -> list[str]:
    """Return the ids of a service's containers, including the containers that have ended. This function needs
    podman."""
    project = os.environ.get("STACK_NAME", "shoal")
    labels = (f"com.docker.compose.project={project}", f"com.docker.compose.service={service}")
    filters = [option for label in labels for option in ("--filter", f"label={label}")]
    return _output("podman", "ps", "--all", "--quiet", *filters).split()


def _wait(service: str, *, healthy: bool) -> None:
    """Wait until all containers of a service are healthy, or until they have ended with exit code 0.

    Args:
        service: Name of the service.
        healthy: Whether the service has a health check. False: the service is a task that ends by itself.
    """
    deadline = time.monotonic() + PATIENCE_S
    waiting = containers(service)
    while waiting:
        state, code = _output(
            "podman", "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", waiting[0]
        ).split()
        if healthy:
            done = _works("podman", "healthcheck", "run", waiting[0])
        else:
            done = state == "exited"
            if done and code != "0":
                raise StackError(f"the service {service} failed:\n{_logs(waiting[0])}")
        if done:
            waiting.pop(0)
        elif time.monotonic() > deadline:
            raise StackError(f"the service {service} is not healthy after {PATIENCE_S} s:\n{_logs(waiting[0])}")
        else:
            time.sleep(2)


def _compose(profiles: set[str]) -> list[object]:
    """Return the first words of a compose command: the program, the compose file and the profiles."""
    options: list[object] = ["--file", COMPOSE]
    for profile in sorted(profiles):
        options += ["--profile", profile]
    if engine() == "docker":
        return ["docker", "compose", *options]
    return [sys.executable, "-m", "podman_compose", "--in-pod", "false", *options]


def _environment() -> dict[str, str]:
    """Return the environment variables for the commands of the container engine."""
    environment = {**os.environ, "SECRETS": str(secrets_folder())}
    if not Path("/run/systemd/system").exists():
        environment["DISABLE_HC_SYSTEMD"] = "true"  # Without it, podman starts no containers with a health check.
    return environment


def _run(*command: object, quiet: bool = False) -> None:
    """Run a command, and print its output. If `quiet` is True, the output is only shown in the error of a failed
    command."""
    pipe = subprocess.PIPE if quiet else None
    done = subprocess.run(
        [str(part) for part in command],
        env=_environment(),
        stdout=pipe,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode:
        raise StackError(
            f"{' '.join(map(str, command[:6]))} failed with exit code {done.returncode}\n{done.stdout or ''}"
        )


def _output(*command: str) -> str:
    """Return the standard output of a command."""
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True).stdout


def _works(*command: str) -> bool:
    """Return whether a command ends with exit code 0."""
    return subprocess.run(command, env=_environment(), capture_output=True).returncode == 0


def _logs(container: str) -> str:
    """Return the last lines that a container printed."""
    done = subprocess.run(["podman", "logs", "--tail", "40", container], capture_output=True, text=True)
    return done.stdout + done.stderr


def _say(text: str, since: float) -> None:
    """Print a text after the number of seconds since a point in time."""
    print(f"{time.monotonic() - since:6.0f} s  {text}", flush=True)


def main() -> None:
    """Run the command that the user has given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["base", "build", "up", "down"])
    parser.add_argument("--name", default=LOCAL_BASE, help="with base: the name of the image")
    parser.add_argument("--profile", action="append", default=[], help="a profile of the compose file, such as prefect")
    parser.add_argument("--everything", action="store_true", help="with down: remove the volumes and the secrets, too")
    given = parser.parse_args()
    profiles = set(given.profile)
    try:
        if given.command == "base":
            base(given.name)
        elif given.command == "build":
            build(profiles)
        elif given.command == "up":
            up(profiles)
        else:
            down(profiles, everything=given.everything)
    except StackError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
