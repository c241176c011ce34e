"""The block `ComputePool`: the definition of a pool, stored on the Prefect server."""

from __future__ import annotations

from copy import copy
from typing import Any, cast

from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from pydantic import ConfigDict, HttpUrl, model_validator

from shoal.pool import api
from shoal.pool.spec import BackendName, PoolSpec, is_uri


def _as_in_spec(field: str) -> Any:
    """Return a copy of a field of `PoolSpec`, so that description, default and limits are defined only there."""
    return copy(PoolSpec.model_fields[field])


class ComputePool(Block):
    """A compute pool: a named set of nodes that training runs on.

    Raises:
        ValidationError: A field is invalid. The message is that of `PoolSpec.parse`.

    Example:
        ```python
        from shoal.prefect import ComputePool, pool_lease

        compute_pool = ComputePool.load("BLOCK_NAME")
        with pool_lease(3, pool_name=compute_pool):
            ...
        ```
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # Errors must not show credentials in an address.

    _block_type_name = "Compute Pool"
    _block_type_slug = "compute-pool"
    _logo_url = HttpUrl("https://shoal.readthedocs.io/en/latest/_static/logo.png")
    _documentation_url = HttpUrl("https://shoal.readthedocs.io/en/latest/prefect/")

    name: str = _as_in_spec("name")
    backend: BackendName = _as_in_spec("backend")
    min_nodes: int = _as_in_spec("min_nodes")
    max_nodes: int = _as_in_spec("max_nodes")
    cpus_per_node: int = _as_in_spec("cpus_per_node")
    gpus_per_node: int = _as_in_spec("gpus_per_node")
    object_store_mb: int = _as_in_spec("object_store_mb")
    idle_timeout: float | None = _as_in_spec("idle_timeout")
    address: str | None = _as_in_spec("address")
    gcs: str | None = _as_in_spec("gcs")
    token_file: str | None = _as_in_spec("token_file")

    @model_validator(mode="before")
    @classmethod
    def _parse_as_pool_spec(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Prefect adds `block_type_slug` to the fields that it stores.
        fields = {name: value for name, value in values.items() if name != "block_type_slug"}
        return PoolSpec.parse(fields).model_dump()

    @property
    def spec(self) -> PoolSpec:
        """Return the definition of the pool."""
        return PoolSpec.parse({name: getattr(self, name) for name in PoolSpec.model_fields})

    def get_pool(self, *, holder: str | None = None) -> api.ComputePool:
        """Return a client of the pool, with methods such as `up()`, `down()` and `scale()`.

        Args:
            holder: Holder of the leases and jobs that are requested through this client; by default this process.

        Example:
            ```python
            ComputePool.load("retrain").get_pool().up()
            ```
        """
        return api.ComputePool(self.spec, holder=holder)


PoolSource = str | ComputePool | None
"""Name, URI or block of a pool; None for the pool that `shoal.pool.selection` selects by default."""


def pool_of(source: PoolSource, *, holder: str | None = None) -> api.ComputePool:
    """Return a client of the pool that a name, URI or block selects.

    Args:
        source: Name, URI or block. With None, the pool is ``$SHOAL_POOL`` or, if this is not set, the only pool.
        holder: Holder of the leases and jobs that are requested through this client; by default this process.

    Raises:
        InvalidArgumentError: The URI is invalid, or neither `source` nor ``$SHOAL_POOL`` is set and the number of pools
            is not one.
        PoolNotFoundError: No pool has this name.
    """
    return source.get_pool(holder=holder) if isinstance(source, ComputePool) else api.ComputePool(source, holder=holder)


def database_url(name: str) -> str | None:
    """Return the SQLAlchemy URL of a database connection from the Secret block of this name; None if there is none."""
    try:
        # `_sync` belongs to Prefect's decorator: in an async task, `load` would return a coroutine even in a thread.
        block = cast("Secret[Any]", Secret.load(name, _sync=True))  # type: ignore[call-arg]
    except ValueError:  # no such block
        return None
    return str(block.get())


def defines(source: PoolSource) -> bool:
    """Return whether `source` defines the pool (URI or block), so that a pool that is down can be brought up."""
    return isinstance(source, ComputePool) or (isinstance(source, str) and is_uri(source))
