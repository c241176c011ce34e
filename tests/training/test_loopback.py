from __future__ import annotations

import socket

import pytest

from shoal.training.host.loopback import is_loopback, open_listeners, tie_to_loopback


def test_listeners_on_all_addresses_are_tied_to_loopback() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        assert {everywhere.fileno(), here.fileno()} <= {listener.fileno() for listener in open_listeners()}
        tie_to_loopback()
        port = everywhere.getsockname()[1]
        assert everywhere.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b""
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


@pytest.mark.parametrize(
    ("address", "answer"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("head.example", False)]
)
def test_is_loopback(address: str, answer: bool) -> None:
    assert is_loopback(address) is answer
