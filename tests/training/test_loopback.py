from __future__ import annotations

import socket

import pytest

from shoal.training.host import own_process
from shoal.training.host.own_process import is_loopback, open_listeners, tie_to_loopback


def test_listeners_on_all_addresses_are_tied_to_loopback() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        assert {everywhere.fileno(), here.fileno()} <= {listener.fileno() for listener in open_listeners()}
        tie_to_loopback()
        port = everywhere.getsockname()[1]
        assert everywhere.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b""
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_a_listener_that_is_closed_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = socket.create_server(("0.0.0.0", 0))
    closed.close()
    with socket.create_server(("0.0.0.0", 0)) as listener:
        monkeypatch.setattr(own_process, "open_listeners", lambda: iter([closed, listener]))
        tie_to_loopback()
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"


@pytest.mark.parametrize(
    ("address", "answer"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("head.example", False)]
)
def test_is_loopback(address: str, answer: bool) -> None:
    assert is_loopback(address) is answer
