"""Specify a pool, as URI, `PoolSpec`, Airflow connection or Prefect block, and the options of scaling one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from shoal.errors import InvalidArgumentError, shown
from shoal.pool.tunables import ROLLBACK_AFTER
from shoal.redaction import has_credentials, redact_value
from shoal.settings import Settings

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_NAME_RULE = "1 to 40 of a-z, 0-9 and -, starting and ending with a letter or digit (URI hosts are lower-cased)"


_OF_RAY = ("address", "gcs", "token_file")


BackendName = Literal["local", "ray"]
"""Kinds of pools; `shoal.pool.backends.BACKENDS` has the class of each."""


class PoolSpec(Settings):
    """A pool of Ray nodes.

    Raises:
        InvalidArgumentError: From :meth:`parse`, naming the field that is wrong.
    """

    name: Annotated[str, Field(description=f"Name of the pool: {_NAME_RULE}.")]
    backend: Annotated[
        BackendName,
        Field(description="Where its nodes run: `local` is this machine, `ray` a cluster that someone else runs."),
    ] = "local"
    min_nodes: Annotated[int, Field(ge=1, description="Nodes held while it is up; the head counts.")] = 1
    max_nodes: Annotated[int, Field(ge=1, le=1000, description="The most nodes it may ever have.")] = 4
    cpus_per_node: Annotated[int, Field(ge=1, le=1024, description="CPUs that each node offers.")] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=64, description="GPUs that each node offers.")] = 0
    object_store_mb: Annotated[int, Field(ge=80, description="Shared memory of a node's object store, in MB.")] = 128
    idle_timeout: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Seconds without job, lease or request after which the pool goes down; none: never.",
        ),
    ] = 24 * 3600.0  # a day: a daily pipeline keeps its pool, one forgotten over the weekend goes

    address: Annotated[
        str | None, Field(description="URL of the cluster's Job API (http://host:8265); of ray:// pools only.")
    ] = None
    gcs: Annotated[
        str | None,
        Field(description="host:port that drivers connect to, if not the head's on Ray's 6379; of ray:// pools only."),
    ] = None
    token_file: Annotated[
        str | None,
        Field(description="0600 file with the cluster's bearer token, where it asks for one; of ray:// pools only."),
    ] = None

    @field_validator("*", mode="before")
    @classmethod
    def _not_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("true and false are no values of a pool option")
        return value

    @field_validator("idle_timeout", *_OF_RAY, mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.lower() == "none" else value

    @field_validator("idle_timeout", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        return None if value == math.inf or (isinstance(value, str) and value.strip().lower() == "inf") else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not is_pool_name(self.name):
            raise ValueError(f'"{self.name}" is no legal pool name: {_NAME_RULE}')
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes={self.min_nodes} is above max_nodes={self.max_nodes}")
        given = [name for name in _OF_RAY if getattr(self, name) is not None]
        if self.backend != "ray" and given:
            raise ValueError(f"{', '.join(given)}: only ray:// pools have {'it' if len(given) == 1 else 'them'}")
        if self.backend == "ray":
            if has_credentials(self.address or ""):
                raise InvalidArgumentError(
                    f"address={redact_value(self.address or '')}: no credentials in a URL; put the token in a file "
                    "and give token_file="
                )
            parts = _url_parts(self.address or "")
            if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"address={self.address!r}: a ray:// pool needs the URL of the cluster's Job API, "
                    f"as in ray://{self.name}?address=http://10.0.0.5:8265"
                )
            if parts.query:
                raise ValueError(f"address={self.address!r}: the URL of a Job API ends with its port or path")
        return self

    @classmethod
    def parse(cls, source: str | PoolSpec | Mapping[str, Any]) -> PoolSpec:
        """Make a spec of a URI (``local://retrain?max_nodes=4``), a mapping of its fields, or a spec.

        Raises:
            InvalidArgumentError: An unknown backend or option, an illegal name, or a value out of range.
        """
        if isinstance(source, PoolSpec):
            return source
        return super().parse(_fields_of_uri(source) if isinstance(source, str) else source)

    @property
    def uri(self) -> str:
        """The URI that :meth:`parse` makes this spec of."""
        given = self.model_dump(exclude_defaults=True, exclude={"name", "backend"})
        query = "&".join(
            f"{key}={'none' if value is None else quote(str(value), safe='/:')}" for key, value in given.items()
        )
        return f"{self.backend}://{self.name}" + (f"?{query}" if query else "")


class ScaleOptions(Settings):
    """The `options` of `scale_cluster`."""

    model_config = ConfigDict(strict=True)

    rollback_after_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = ROLLBACK_AFTER
    block_until_min_cluster_size: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def for_size(cls, options: Mapping[str, Any] | None, size: int) -> ScaleOptions:
        """Check the options of a scaling before anything starts.

        Args:
            options: As `scale_cluster` takes them.
            size: Number of nodes that is requested.

        Raises:
            InvalidArgumentError: An unknown option, or a value out of range, by name.
        """
        parsed = cls.parse(options or {})
        minimum = parsed.block_until_min_cluster_size
        if minimum is not None and minimum > size:
            raise InvalidArgumentError(
                f"block_until_min_cluster_size={minimum} is above expected_cluster_size={size}: "
                f"it can be {size} at most"
            )
        return parsed


def checked_size(value: Any, name: str = "expected_cluster_size") -> int:
    """A number of nodes.

    Raises:
        InvalidArgumentError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={shown(value)}: it has to be a whole number of nodes, 1 or more")
    return value


def is_pool_name(text: str) -> bool:
    """Whether a pool can have this name."""
    return _NAME.fullmatch(text) is not None


def is_uri(source: str) -> bool:
    """True for ``local://name…``, False for a bare pool name."""
    return "://" in source


def _url_parts(url: str) -> SplitResult | None:
    """The parts of a URL; None where it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # checked only when asked for
    except ValueError:
        return None
    return parts


def _fields_of_uri(uri: str) -> dict[str, Any]:
    parts = _url_parts(uri)
    if parts is None or not parts.scheme or "://" not in uri:
        raise InvalidArgumentError(f'"{uri}" is no pool URI; one looks like local://retrain?max_nodes=4')
    if parts.path.strip("/") or parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidArgumentError(f'"{uri}": a pool is {parts.scheme}://NAME?option=value and nothing else')
    fields: dict[str, Any] = {"backend": parts.scheme, "name": parts.netloc}
    try:
        options = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise InvalidArgumentError(f'"{uri}": its options cannot be read: {error}') from None
    for key, value in options:
        if key in fields:
            raise InvalidArgumentError(f'"{uri}" gives {key} twice')
        fields[key] = value
    return fields
