"""The Prefect block `ComputePool`, which stores the definition of a pool on the Prefect server."""

from __future__ import annotations

import json
from typing import Any, cast

from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from pydantic import ConfigDict, HttpUrl, SecretStr, model_validator

from shoal.errors import InvalidArgumentError
from shoal.installation import address
from shoal.option_validation import optional
from shoal.pool import api
from shoal.pool.endpoint import check_token, with_token
from shoal.pool.holder import Ancestors
from shoal.pool.spec import PoolFields, PoolSpec, is_uri, refuse_definition

_ONLY_IN_BLOCKS = frozenset(
    ("team", "token", "block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous")
)
"""Fields that `PoolSpec` does not have: those of `ComputePool`, and those that Prefect adds to blocks that it stores or
passes as parameters."""


def _page(path: str) -> HttpUrl | None:
    site = address("Documentation")
    return HttpUrl(f"{site}/{path}") if site else None


class ComputePool(Block, PoolFields):
    """A compute pool: a named set of nodes on which trainings run.

    Raises:
        ValidationError: A field is invalid. The error contains the message of `PoolSpec.parse`.

    Example:
        ```python
        from shoal.prefect import ComputePool, pool_lease

        compute_pool = ComputePool.load("BLOCK_NAME")
        with pool_lease(3, pool_name=compute_pool):
            ...
        ```
    """

    # By default, pydantic's errors show the input, which may contain credentials, for example in `address`.
    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name = "Compute Pool"
    _block_type_slug = "compute-pool"
    _logo_url = _page("_static/logo.png")
    _documentation_url = _page("docs/prefect.html")

    team: str | None = optional(
        "Team for which tasks with this block act: the quota (`shoal pool quota`) of its leases, and the "
        "owner of its jobs."
    )

    token: SecretStr | None = optional(
        "Bearer token of the Ray cluster, instead of `token_file`. Each process that uses the block writes "
        "the token to a file (mode 0600) in $SHOAL_HOME. Allowed only for ray:// pools."
    )

    @model_validator(mode="before")
    @classmethod
    def _parse_as_pool_spec(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # `PoolSpec` rejects unknown fields, so those that only a block has are removed here.
        spec = PoolSpec.parse({name: value for name, value in values.items() if name not in _ONLY_IN_BLOCKS})
        token = values.get("token") or None  # Prefect's form may send an empty text.
        if token is not None:
            text = token.get_secret_value() if isinstance(token, SecretStr) else token
            if not text.strip("*"):
                raise InvalidArgumentError(
                    f"the token of the block has only asterisks, because Prefect hides the secrets of a block that is "
                    f"a parameter of a flow run: pass the name of the block instead, and load it in the flow with "
                    f'ComputePool.load("{values.get("_block_document_name") or "BLOCK_NAME"}")'
                )
            check_token(spec, "the block", "token")
        return {**spec.model_dump(), "team": values.get("team"), "token": token}

    @property
    def spec(self) -> PoolSpec:
        """Return the definition of the pool as a `PoolSpec`.

        A token is written to a file in ``$SHOAL_HOME``, and the definition contains only the path of this file.
        """
        spec = PoolSpec.parse({name: getattr(self, name) for name in PoolSpec.model_fields})
        return spec if self.token is None else with_token(spec, self.token.get_secret_value())

    def get_pool(self, *, holder: str | None = None) -> api.ComputePool:
        """Return a client of the pool, with methods such as `up()`, `down()` and `scale()`.

        Args:
            holder: Name of the holder of the leases and jobs that are requested through this client. By default, a name
                made from user, host and process id.

        Example:
            ```python
            ComputePool.load("retrain").get_pool().up()
            ```
        """
        return pool_of(self, holder=holder)


PoolSource = str | ComputePool | None
"""Type of arguments that select a pool: its name, its URI, or a block. None selects the pool that ``$SHOAL_POOL`` names
or, if the variable is not set, the only pool that is up."""


def pool_of(source: PoolSource, *, holder: str | None = None, ancestors: Ancestors | None = None) -> api.ComputePool:
    """Return a client for the pool that is given by its name, its URI or a `ComputePool` block.

    Args:
        source: Name, URI or block of the pool.
        holder: Name of the holder of the leases that are requested through this client.
        ancestors: Holders whose end is also the end of these leases.

    Raises:
        InvalidArgumentError: The URI is invalid; or neither `source` nor ``$SHOAL_POOL`` names a pool, and the pools in
            the store do not determine which pool to use.
        PoolNotFoundError: No pool has this name.
    """
    if isinstance(source, dict):
        raise InvalidArgumentError(
            "pool_name is a dict: a block that is a parameter of a flow run arrives as a dict if the parameter has no "
            "type. Annotate the parameter with ComputePool, or pass the name of the block and load it in the flow"
        )
    refuse_definition(source)
    team = source.team if isinstance(source, ComputePool) else None
    spec = source.spec if isinstance(source, ComputePool) else source
    return api.ComputePool(spec, holder=holder, ancestors=ancestors, team=team)


def secret_block(variable: str) -> str | None:
    """Return the value of a variable from a Prefect Secret block, or None if the block does not exist.

    Names of blocks have no upper case and no underscores: the block of the variable ``HF_TOKEN`` is ``hf-token``.
    """
    return database_url(variable.lower().replace("_", "-"))


def database_url(name: str) -> str | None:
    """Return the database URL (for SQLAlchemy), or the settings of a storage or catalog, from the Prefect Secret block
    of this name, or the settings of a storage from the block AwsCredentials; None if there is none."""
    try:
        # In an async task, `load` would return a coroutine, even in a thread without an event loop. With `_sync`, an
        # argument of Prefect's decorator, `load` returns the block.
        block = cast("Secret[Any]", Secret.load(name, _sync=True))  # type: ignore[call-arg]
    except ValueError:  # The block does not exist.
        return _aws_settings(name)
    value = block.get()
    return value if isinstance(value, str) else json.dumps(value)


def _aws_settings(name: str) -> str | None:
    try:
        from prefect_aws import AwsCredentials

        block = AwsCredentials.load(name, _sync=True)
    except (ImportError, ValueError):
        return None
    secret = block.aws_secret_access_key
    # A profile is refused as an unknown setting: the keys of the process would be used instead.
    names = ("aws_access_key_id", "aws_session_token", "region_name", "profile_name")
    given = {each: getattr(block, each) for each in names}
    given["aws_secret_access_key"] = secret and secret.get_secret_value()
    endpoint = block.aws_client_parameters.endpoint_url
    return json.dumps({**given, "endpoint_url": endpoint, "role_arn": block.assume_role_arn})


def defines(source: PoolSource) -> bool:
    """Return whether `source` contains the pool's settings. The result is True for a URI or a block, and False for a
    name.

    A pool that is down can be brought up only with its settings, not with its name alone.
    """
    return isinstance(source, ComputePool) or (isinstance(source, str) and is_uri(source))
