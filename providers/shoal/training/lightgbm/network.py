"""Connect LightGBM's workers: each reserves a port, and connects by the list of all addresses when all are ready."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from lightgbm.basic import _LIB, LightGBMError, _c_str, _safe_call

from shoal.errors import TrainingError
from shoal.training.host.loopback import is_loopback, tie_to_loopback

# How many minutes longer than its peers a live worker may take for a step; the same as for XGBoost.
_STEP_MINUTES = 10
# Another process may take the port in the moment between its release here and LightGBM's bind. LightGBM then tries
# again, because the other process may release the port.
_TRIES = 10
_PATIENCE_SECONDS = 0.5
_TIE_SECONDS = 0.002


class Port:
    """A port that is reserved on this node until LightGBM uses it; LightGBM accepts only a port number, not a socket.

    Args:
        host: Address of this node.

    Raises:
        TrainingError: The address is an IPv6 address, which LightGBM does not support.
    """

    def __init__(self, host: str) -> None:
        if ":" in host:
            raise TrainingError(
                f"LightGBM does not support IPv6, but the address of this node is {host}: use IPv4 addresses for the "
                "pool"
            )
        self._host = host
        # The socket is bound to all addresses, because LightGBM will bind to all. It does not listen.
        self._held = socket.socket()
        self._held.bind(("", 0))
        self._number: int = self._held.getsockname()[1]
        self._joined = False

    @property
    def address(self) -> str:
        """Address and port at which the peers can connect to this worker."""
        return f"{self._host}:{self._number}"

    def join(self, machines: Sequence[str]) -> None:
        """Connect to the other workers, and return when all are connected; further calls do nothing.

        Args:
            machines: Address of each worker, by rank. LightGBM uses the index in this list as the rank.

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
        """Disconnect from the other workers, or release the port if it was never used."""
        self._held.close()
        if self._joined:
            _safe_call(_LIB.LGBM_NetworkFree())

    def _connect(self, machines: str, count: int) -> None:
        for last in (*[False] * (_TRIES - 1), True):
            try:
                _safe_call(_LIB.LGBM_NetworkInit(_c_str(machines), self._number, _STEP_MINUTES, count))
                return
            except LightGBMError as exc:
                if "Binding port" not in str(exc):
                    raise
                if last:
                    raise TrainingError(
                        f"another process uses port {self._number} of {self._host}, which shoal had reserved for "
                        "LightGBM: train again"
                    ) from exc
            time.sleep(_PATIENCE_SECONDS)


@contextlib.contextmanager
def _listening_on_loopback_only() -> Iterator[None]:
    """Bind LightGBM's listening socket to the loopback device while LightGBM connects.

    LightGBM closes the socket when all workers are connected. The thread can run meanwhile, because ctypes releases the
    GIL during the call.
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
