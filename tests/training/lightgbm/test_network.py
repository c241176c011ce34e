"""Ports and connections, each rank in a thread of its own: LightGBM's network belongs to a thread."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from shoal.errors import TrainingError
from shoal.training.lightgbm import worker
from shoal.training.lightgbm.worker import Port


def test_workers_connect_and_leave_as_often_as_they_train() -> None:
    barrier = Barrier(2)

    def work(rank: int) -> None:
        for _ in range(2):
            port = Port("127.0.0.1")
            machines[rank] = port.address
            barrier.wait(10)
            port.join(machines)
            port.join(machines)  # each segment asks for it; only the first connects
            port.close()
            barrier.wait(10)

    machines = ["", ""]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def test_the_port_is_held_but_does_not_listen() -> None:
    port = Port("127.0.0.1")
    number = int(port.address.split(":")[1])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", number))
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.1", number))
    port.close()


def test_a_port_that_another_process_takes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_TRIES", 2)
    monkeypatch.setattr(worker, "_PATIENCE_SECONDS", 0.01)
    port = Port("127.0.0.1")
    number = int(port.address.split(":")[1])
    port._held.close()
    with socket.socket() as other:
        other.bind(("", number))
        other.listen()
        with pytest.raises(TrainingError, match=f"port {number} of 127.0.0.1"):
            port.join([port.address, "127.0.0.1:9"])


def test_alone_there_is_nothing_to_connect_to() -> None:
    port = Port("127.0.0.1")
    port.join([port.address])
    port.close()


def test_ipv6_is_refused() -> None:
    with pytest.raises(TrainingError, match="IPv6"):
        Port("fe80::1")


def test_listeners_are_tied_to_loopback_meanwhile() -> None:
    with worker._listening_on_loopback_only(), socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        for _ in range(1_000):
            device = listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
            if device:
                break
            worker.time.sleep(0.005)
    assert device == b"lo"
