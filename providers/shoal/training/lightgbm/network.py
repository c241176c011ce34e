"""How LightGBM's workers find each other: each holds a port until all are ready, then they connect by their list."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from lightgbm.basic import _LIB, LightGBMError, _c_str, _safe_call

from shoal.errors import TrainingError
from shoal.training.host.loopback import is_loopback, tie_to_loopback

# How much longer than its peers a living worker may take for a step, in minutes; as with XGBoost.
_STEP_MINUTES = 10
# A port that is let go of is LightGBM's a moment later; where another process was faster, it may let go of it again.
_TRIES = 10
_PATIENCE_SECONDS = 0.5
_TIE_SECONDS = 0.002


class Port:
    """A port of this worker's node, held for LightGBM, which can only be told its number.

    Args:
        host: This node's address.

    Raises:
        TrainingError: If the address is one of IPv6, which LightGBM does not speak.
    """

    def __init__(self, host: str) -> None:
        if ":" in host:
            raise TrainingError(f"LightGBM knows no IPv6, and this node is {host}: give the pool IPv4 addresses")
        self._host = host
        # On all addresses, as LightGBM will; nothing listens on it.
        self._held = socket.socket()
        self._held.bind(("", 0))
        self._number: int = self._held.getsockname()[1]
        self._joined = False

    @property
    def address(self) -> str:
        """Where peers will find this worker."""
        return f"{self._host}:{self._number}"

    def join(self, machines: Sequence[str]) -> None:
        """Connect to the other workers, once; returns when all are connected.

        Args:
            machines: Every worker's address, by rank: LightGBM's ranks are the places in this list.

        Raises:
            TrainingError: If another process took the port.
        """
        if self._joined or len(machines) == 1:
            return
        self._held.close()
        with _listening_on_loopback_only() if is_loopback(self._host) else contextlib.nullcontext():
            self._connect(",".join(machines), len(machines))
        self._joined = True

    def close(self) -> None:
        """Leave the other workers, or let go of the port."""
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
                        f"another process took port {self._number} of {self._host} before LightGBM could listen on it: "
                        "train again"
                    ) from exc
            time.sleep(_PATIENCE_SECONDS)


@contextlib.contextmanager
def _listening_on_loopback_only() -> Iterator[None]:
    """Ties LightGBM's listener while it connects, after which it is closed; ctypes lets this thread run meanwhile."""
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
