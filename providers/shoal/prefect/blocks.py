"""The block `ComputePool`: a pool's definition, kept on the Prefect server."""

from __future__ import annotations

from copy import copy
from typing import Any

from prefect.blocks.core import Block
from pydantic import ConfigDict, HttpUrl, model_validator

from shoal.pool import api
from shoal.pool.spec import BackendName, PoolSpec, is_uri


def _as_in_spec(field: str) -> Any:
    """Description, default and limits of a field of `PoolSpec`: said once, there."""
    return copy(PoolSpec.model_fields[field])


class ComputePool(Block):
    """A compute pool: a named set of nodes that training runs on.

    Raises:
        ValidationError: A field is wrong; the message is that of `PoolSpec.parse`.

    Example:
        ```python
        from shoal.prefect import ComputePool, pool_lease

        compute_pool = ComputePool.load("BLOCK_NAME")
        with pool_lease(3, pool_name=compute_pool):
            ...
        ```
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # an address may have credentials, which are refused

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
    def _through_the_one_parser(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Prefect adds this one to what it stores.
        fields = {name: value for name, value in values.items() if name != "block_type_slug"}
        return PoolSpec.parse(fields).model_dump()

    @property
    def spec(self) -> PoolSpec:
        """What it defines."""
        return PoolSpec.parse({name: getattr(self, name) for name in PoolSpec.model_fields})

    def get_pool(self, *, holder: str | None = None) -> api.ComputePool:
        """The pool itself, with `up()`, `down()`, `scale()` and all the rest.

        Args:
            holder: Who asks; by default this process.

        Example:
            ```python
            ComputePool.load("retrain").get_pool().up()
            ```
        """
        return api.ComputePool(self.spec, holder=holder)


PoolSource = str | ComputePool | None
"""Which pool: its name, a URI, a block; None where the rule of `shoal.pool.resolve` knows."""


def pool_of(source: PoolSource, *, holder: str | None = None) -> api.ComputePool:
    """The core's pool that is meant.

    Args:
        source: Name, URI or block.
        holder: Who asks; by default this process.

    Raises:
        InvalidArgumentError: A wrong URI, or none was named and there is not exactly one.
        PoolNotFoundError: There is no pool of that name.
    """
    return source.get_pool(holder=holder) if isinstance(source, ComputePool) else api.ComputePool(source, holder=holder)


def defines(source: PoolSource) -> bool:
    """Whether it says what the pool is, and not only its name: then a pool that is down can be brought up."""
    return isinstance(source, ComputePool) or (isinstance(source, str) and is_uri(source))
