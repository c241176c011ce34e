"""Connect LightGBM's workers to each other.

Each worker reserves a port. When all workers are ready, each worker gets the list of all addresses and connects to the
other workers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from lightgbm.basic import _LIB, LightGBMError, _c_str, _safe_call

from shoal.errors import TrainingError
from shoal.training.host.loopback import is_loopback, tie_to_loopback
from shoal.training.timeouts import COLLECTIVE_S

# Number of attempts to bind LightGBM to the reserved port. shoal must release the port just before LightGBM binds to
# it, so another process may take the port. That process may soon release the port, so shoal tries again.
_TRIES = 10
_PATIENCE_SECONDS = 0.5
_TIE_SECONDS = 0.002


class Port:
    """Port that is reserved on this node for LightGBM, which accepts only the number of a port and not an open socket.

    Args:
        host: Address of this node.

    Raises:
        TrainingError: The address is an IPv6 address, which LightGBM does not support.
    """

    def __init__(self, host: str) -> None:
        if ":" in host:
            raise TrainingError(
                f"LightGBM does not support IPv6, but the address of this node is {host}: create the pool with IPv4 "
                "addresses"
            )
        self._host = host
        # This socket reserves the port number and does not listen. It is bound to all addresses of the host, because
        # LightGBM will also bind to all addresses.
        self._held = socket.socket()
        self._held.bind(("", 0))
        self._number: int = self._held.getsockname()[1]
        self._joined = False

    @property
    def address(self) -> str:
        """Address and port at which the other workers can connect to this worker, as ``host:port``."""
        return f"{self._host}:{self._number}"

    def join(self, machines: Sequence[str]) -> None:
        """Connect to the other workers, and return when all are connected; further calls do nothing.

        Raises:
            TrainingError: Another process took the port.
        """
        if self._joined or len(machines) == 1:
            return
        self._held.close()
        with _listening_on_loopback_only() if is_loopback(self._host) else contextlib.nullcontext():
            self._connect(",".join(machines), len(machines))
        self._joined = True

    def close(self) -> None:
        """Disconnect from the other workers; if this worker never connected, release the reserved port."""
        self._held.close()
        if self._joined:
            _safe_call(_LIB.LGBM_NetworkFree())

    def _connect(self, machines: str, count: int) -> None:
        for last in (*[False] * (_TRIES - 1), True):
            try:
                _safe_call(_LIB.LGBM_NetworkInit(_c_str(machines), self._number, COLLECTIVE_S // 60, count))
                return
            except LightGBMError as exc:
                if "Binding port" not in str(exc):
                    raise
                if last:
                    raise TrainingError(
                        f"another process uses port {self._number} of {self._host}, which shoal had reserved for "
                        "LightGBM: start the training again"
                    ) from exc
            time.sleep(_PATIENCE_SECONDS)


@contextlib.contextmanager
def _listening_on_loopback_only() -> Iterator[None]:
    """Restrict LightGBM's listening socket to the loopback device while the workers connect, so that no other host can
    connect.

    LightGBM opens the socket inside a C call and closes it when all workers are connected. A second thread therefore
    looks for the socket during the call. The thread can run, because ctypes releases the GIL during the call.
    """
    over = threading.Event()

    def tie() -> None:
        while not over.wait(_TIE_SECONDS):
            tie_to_loopback()

    thread = threading.Thread(target=tie, name="shoal-tie", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
