"""A private PostgreSQL server: its files in a temp folder, on a free loopback port, gone with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg

from examples.ports import free_port
from tests.support.waiting import wait_until

USER, PASSWORD = "shoal", "not-a-secret"

MISSING = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
"""Why tests are skipped without it."""


def binaries() -> Path | None:
    """Folder of the newest server's programs, or None where there is none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).parent)
    return max(
        found, key=lambda path: [int(part) for part in path.parent.name.split(".") if part.isdigit()], default=None
    )


class Postgres:
    """A server that can be stopped and started again on the same port.

    Args:
        max_connections: Most connections at a time.
        host: Address of this machine at which other hosts of its network reach the server, too.
    """

    def __init__(self, max_connections: int = 80, host: str = "127.0.0.1") -> None:
        self._max_connections = max_connections
        self._host = host
        found = binaries()
        assert found is not None
        self._binaries = found
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
        self._server: subprocess.Popen[bytes] | None = None
        # The server refuses to run as root.
        self._user = _unprivileged() if os.getuid() == 0 else None
        if self._user:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self.port = free_port()
        password = self._folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)  # in a 0700 folder
        subprocess.run(
            self._as_user(
                [
                    str(self._binaries / "initdb"), "--pgdata", str(self._data), "--username", USER,
                    "--pwfile", str(password), "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-sync",
                ]
            ),
            env=self._environment, cwd=self._folder, check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {host}/24 scram-sha-256\n")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {
            "listen_addresses": f"127.0.0.1,{self._host}", "port": self.port, "unix_socket_directories": self._folder,
            "max_connections": self._max_connections, "fsync": "off", "full_page_writes": "off",
        }  # fmt: skip
        arguments = [argument for name, value in settings.items() for argument in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                self._as_user([str(self._binaries / "postgres"), "-D", str(self._data), *arguments]),
                env=self._environment, cwd=self._folder, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._answers, "PostgreSQL", seconds=60)

    def stop(self) -> None:
        """End it and every connection, as at a fail-over."""
        if self._server:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(timeout=60)
            self._server = None

    def become_standby(self) -> None:
        """Start it anew as one that only follows a primary, as after a fail-over."""
        self.stop()
        (self._data / "standby.signal").touch()
        self.start()

    def become_primary(self) -> None:
        """The reverse."""
        self.stop()
        (self._data / "standby.signal").unlink()
        self.start()

    def remove(self) -> None:
        """Stop it and remove its files."""
        self.stop()
        shutil.rmtree(self._folder)

    def url(self, database: str, *, user: str = USER, password: str = PASSWORD) -> str:
        """URL of one of its databases."""
        return f"postgresql+psycopg://{user}:{password}@{self._host}:{self.port}/{database}"

    def run(self, command: str, database: str = "postgres") -> list[tuple]:
        """Run one SQL command, as its owner."""
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(command)
            return cursor.fetchall() if cursor.description else []

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "LC_ALL": "C"}

    def _as_user(self, command: list[str]) -> list[str]:
        """It dies with the tests, however they end."""
        user = self._user
        become = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"] if user else []
        return ["setpriv", *become, "--pdeathsig", "INT", *command]

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self._folder / "log").read_text()
        try:
            self.run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True


def _unprivileged() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
