"""Backends, which start and end the nodes of pools. Each subpackage contains one implementation of the interface
`interface.Backend`."""

from __future__ import annotations

import logging
from typing import cast

from shoal.errors import InvalidArgumentError
from shoal.pool.backends.interface import Backend
from shoal.pool.options import backend_class, backend_names
from shoal.pool.spec import PoolSpec

log = logging.getLogger(__name__)


def backend_of(spec: PoolSpec) -> Backend:
    """Return the backend of a pool."""
    return cast(Backend, backend_class(spec.backend)())


def all_backends() -> list[Backend]:
    """Return the backends of shoal and of all other installed packages that can be imported."""
    found: list[Backend] = []
    for name in backend_names():
        try:
            found.append(backend_class(name)())
        except InvalidArgumentError as error:
            log.warning("%s", error)
    return found
