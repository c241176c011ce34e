"""Pool specifications (as URI, `PoolSpec`, Airflow connection or Prefect block) and the options of scaling."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, quote

from pydantic import ConfigDict, Field, ValidationInfo, create_model, field_validator, model_validator

from shoal.errors import InvalidArgumentError, shown
from shoal.option_validation import Settings
from shoal.pool.options import OPTIONS, missing, options_of
from shoal.pool.options.base import NAME_RULE, is_pool_name, url_parts
from shoal.pool.options.kuberay import KubeRayOptions
from shoal.pool.options.local import LocalOptions
from shoal.pool.options.ray import RayOptions
from shoal.pool.timeouts import ROLLBACK_AFTER
from shoal.secrets.redaction import redact_address


def pool_name_of(text: str) -> str:
    """Derive a valid pool name from any text, for example from a notebook's name with spaces or quotation marks.

    The text is converted to lower case, and each sequence of characters that are neither letters a-z nor digits becomes
    one hyphen: ``"MY_NOTEBOOK"`` becomes ``my-notebook``. A valid pool name stays the same. If the result is empty or
    longer than 40 characters, its end is replaced by a hash of the text (8 hexadecimal digits).
    """
    if is_pool_name(text):
        return text
    name = "-".join(re.findall("[a-z0-9]+", text.lower()))
    if is_pool_name(name):
        return name
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[:31].rstrip('-')}-{digest}".lstrip("-")


class PoolFields(KubeRayOptions, RayOptions, LocalOptions):
    """Fields that `PoolSpec` and the Prefect block `ComputePool` have in common: the options of shoal's own backends,
    because they are stored, and given in forms, as one flat object."""

    backend: Literal["local", "ray", "kuberay"] = Field(
        default="local",
        description="Place where the nodes run: `local` is this machine, `ray` is an existing Ray cluster, `kuberay` "
        "is a Ray cluster on Kubernetes whose size KubeRay's operator changes.",
    )


class PoolSpec(PoolFields, Settings):
    """Settings of a pool: its name, the place where its nodes run, and the number and size of the nodes.

    Only :meth:`parse` knows the options of backends that other packages bring.

    Raises:
        InvalidArgumentError: Raised by :meth:`parse`; the message names the invalid field.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        name, is_timeout = str(info.field_name), info.field_name == "idle_timeout"
        if isinstance(value, bool) and cls.model_fields[name].annotation is not bool:
            raise ValueError("true and false are not allowed as values of this option: give a number or a text")
        if is_timeout and (value == math.inf or (isinstance(value, str) and value.strip().lower() == "inf")):
            return None
        may_be_none = is_timeout or name not in LocalOptions.model_fields
        return None if may_be_none and isinstance(value, str) and value.lower() == "none" else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not is_pool_name(self.name):
            raise ValueError(f'"{self.name}" is not a valid pool name: {NAME_RULE}')
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes={self.min_nodes} is above max_nodes={self.max_nodes}: change one of the two")
        own = options_of(self.backend)
        for kind, options in OPTIONS.items():
            others = {name: field for name, field in options.model_fields.items() if name not in own.model_fields}
            if given := [name for name, field in others.items() if getattr(self, name) != field.default]:
                raise ValueError(
                    f"a {self.backend}:// pool has options that are allowed only for {kind}:// pools: "
                    f"{', '.join(given)}; remove these options"
                )
        if self.gpus_per_node < 0 and not issubclass(own, LocalOptions):
            raise ValueError("gpus_per_node=-1 is allowed only for local:// pools: give the number of GPUs")
        if wrong := [folder for folder in self.shared() if not folder.startswith("/")]:
            raise ValueError(
                f"shared_folders={self.shared_folders}: {wrong[0]} is not an absolute path; begin each path with /"
            )
        if self.only_team == "*":
            raise ValueError("only_team=* is not the name of a team: name the team, or remove the option")
        own.check_options(self)
        return self

    @classmethod
    def parse(cls, source: str | PoolSpec | Mapping[str, Any]) -> PoolSpec:
        """Build a spec from a URI (``local://retrain?max_nodes=4``), from a mapping of its fields, or from a spec.

        Raises:
            InvalidArgumentError: The backend or an option is unknown, the name is invalid, or a value is out of range.
        """
        if isinstance(source, PoolSpec):
            return source
        fields = _fields_of_uri(source) if isinstance(source, str) else source
        return super(PoolSpec, _class_of(fields)).parse(fields)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Build a spec from its fields, such as those in the store."""
        own = _class_of(obj) if cls is PoolSpec else cls
        return super(PoolSpec, own).model_validate(obj, **options)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a spec be pickled whose class was made for the backend of another package."""
        return PoolSpec.parse, (self.uri,)

    def check_size(self, size: int, name: str, *, is_up: bool = False) -> None:
        """Raise an error if a requested number of nodes is above the pool's `max_nodes`.

        The limits of an existing pool may differ from this spec, because `shoal pool alter` changes them. The actual
        limits are checked when the nodes are requested.

        Args:
            size: Requested number of nodes.
            name: Name of the argument, for the message.
            is_up: Whether these are the settings of a pool that is up, in the store.

        Raises:
            InvalidArgumentError: The number is above `max_nodes`.
        """
        if size > self.max_nodes:
            by = f"with `shoal pool alter {self.name} --max-nodes {size}`" if is_up else f"in {self.uri}"
            raise InvalidArgumentError(
                f'{name}={size} is above max_nodes={self.max_nodes} of pool "{self.name}": raise max_nodes {by}, or '
                f"request at most {self.max_nodes}"
            )

    def shares(self, path: str) -> bool:
        """Return whether a path is in a folder that the nodes share with all hosts."""
        return any(Path(path).is_relative_to(folder) for folder in self.shared())

    def check_token_is_private(self) -> None:
        """Raise an error if the pool would send its token without encryption to another host. Call it for a kuberay://
        pool only if its RayCluster has a token.

        Raises:
            InvalidArgumentError: As `check_url_of_token`.
        """
        if not self.address or self.token_file is not None:
            self.check_url_of_token(self.address or self.api)

    @property
    def uri(self) -> str:
        """Return the URI from which :meth:`parse` builds this spec."""
        place = options_of(self.backend).place
        given = self.model_dump(exclude_defaults=True, exclude={"backend", *place})
        query = "&".join(f"{key}={_in_uri(value)}" for key, value in given.items())
        return f"{self.backend}://{'/'.join(getattr(self, name) for name in place)}" + (f"?{query}" if query else "")


def spec_of_row(settings: Mapping[str, Any]) -> PoolSpec | None:
    """Return the spec of a pool from its row in the store; None if this process lacks the pool's backend."""
    return None if missing(settings.get("backend", "local")) else PoolSpec.model_validate(settings)


def _class_of(fields: Any) -> type[PoolSpec]:
    """Return `PoolSpec`, or its subclass with the options of another package's backend."""
    backend = fields.get("backend") if isinstance(fields, Mapping) else None
    return PoolSpec if not isinstance(backend, str) or backend in OPTIONS else _with_options_of(backend)


@functools.cache
def _with_options_of(backend: str) -> type[PoolSpec]:
    bases: Any = (options_of(backend), PoolSpec)
    found: type[PoolSpec] = create_model(f"PoolSpec_{backend}", __base__=bases, backend=(str, backend))
    return found


def _in_uri(value: Any) -> str:
    """Return an option's value as text for a URI."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return quote(str(value), safe="/:,")


class ScaleOptions(Settings):
    """The `options` of `scale_cluster`: after how many seconds an unfinished request is rolled back, and for how many
    ready nodes the call waits."""

    model_config = ConfigDict(strict=True)

    rollback_after_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = ROLLBACK_AFTER
    block_until_min_cluster_size: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def for_size(cls, options: Mapping[str, Any] | None, size: int) -> Self:
        """Build the options of a scale operation from a mapping, and check that they are valid for the requested number
        of nodes.

        Raises:
            InvalidArgumentError: An option is unknown or out of range. The message names the option.
        """
        parsed = cls.parse(options or {})
        minimum = parsed.block_until_min_cluster_size
        if minimum is not None and minimum > size:
            raise InvalidArgumentError(
                f"block_until_min_cluster_size={minimum} is above expected_cluster_size={size}: "
                f"set block_until_min_cluster_size to at most {size}"
            )
        return parsed


class LeaseOptions(ScaleOptions):
    """The `options` of a lease: the options of `scale_cluster`, and limits for the lease's lifetime and node-hours."""

    max_lifetime: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    budget_node_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @classmethod
    def for_size(cls, options: Mapping[str, Any] | None, size: int) -> Self:
        """Build the options of a lease from a mapping, and check that they are valid for the requested number of nodes.

        Raises:
            InvalidArgumentError: An option is unknown or out of range, or the lease could use more node-hours in its
                `max_lifetime` than `budget_node_hours` allows.
        """
        parsed = super().for_size(options, size)
        lifetime, budget = parsed.max_lifetime, parsed.budget_node_hours
        if lifetime is not None and budget is not None and size * lifetime > budget * 3600:
            raise InvalidArgumentError(
                f"{size} nodes for max_lifetime={lifetime:g} s are {size * lifetime / 3600:.4g} node-hours, above "
                f"budget_node_hours={budget:g}: set max_lifetime to at most {budget * 3600 / size:.0f}, request fewer "
                "nodes, or raise the budget"
            )
        return parsed


def checked_size(value: Any, name: str = "expected_cluster_size") -> int:
    """Check that a value is a valid number of nodes, and return the value.

    Raises:
        InvalidArgumentError: The value is not an integer of 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={shown(value)}: it has to be a whole number of nodes, 1 or more")
    return value


AUTO = "auto"
"""Number of nodes that shoal plans from the spec of a training (`plan_for`)."""


def is_auto(size: Any, plan_for: Any, name: str = "expected_cluster_size") -> bool:
    """Return whether the number of nodes is planned from the spec of a training.

    Raises:
        InvalidArgumentError: Only one of ``"auto"`` and `plan_for` is given.
    """
    if (size == AUTO) != (plan_for is not None):
        raise InvalidArgumentError(
            f'{name}={shown(size)} with plan_for={shown(plan_for)}: give {name}="auto" and the spec of a training as '
            "plan_for, for which the number of nodes is planned; or give a number of nodes, and no plan_for"
        )
    return bool(size == AUTO)


def is_uri(source: str) -> bool:
    """Return whether a text is a pool URI, such as ``local://name`` or ``ray://name?address=…``, and not a bare pool
    name."""
    return "://" in source


URIS_VARIABLE = "SHOAL_POOL_URIS"
"""Environment variable with the value ``refuse`` if only connections of Airflow and blocks of Prefect define pools."""


def refuse_definition(source: object) -> None:
    """Refuse the URI of a pool in a DAG or flow if `URIS_VARIABLE` says so.

    Raises:
        InvalidArgumentError: `source` is a URI, and only connections and blocks define pools.
    """
    if isinstance(source, str) and is_uri(source) and os.environ.get(URIS_VARIABLE, "").strip().lower() == "refuse":
        raise InvalidArgumentError(
            f"{redact_address(source)} defines a pool, but here only Airflow connections and Prefect blocks define "
            f"pools (${URIS_VARIABLE}=refuse): pass the id of a connection or a block, or the name of a pool"
        )


def _fields_of_uri(uri: str) -> dict[str, Any]:
    parts = url_parts(uri)
    if parts is None or not parts.scheme or "://" not in uri:
        raise InvalidArgumentError(
            f'"{redact_address(uri)}" is not a pool URI: write, for example, local://retrain?max_nodes=4'
        )
    try:
        place = options_of(parts.scheme).place
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f'"{redact_address(uri)}": {error}') from None
    path = parts.path.strip("/")
    given = [parts.netloc, *(path.split("/") if path else ())]
    if len(given) != len(place) or parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidArgumentError(
            f'"{redact_address(uri)}": a pool URI has the form {parts.scheme}://{"/".join(place).upper()}?option=value'
            f", without user, port, {'further ' * (len(place) > 1)}path or fragment"
        )
    fields: dict[str, Any] = {"backend": parts.scheme, **dict(zip(place, given, strict=True))}
    try:
        options = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise InvalidArgumentError(f'"{uri}": the options after "?" cannot be read: {error}') from None
    for key, value in options:
        if key in fields:
            raise InvalidArgumentError(f'"{uri}" contains the option {key} twice: remove one of the two')
        fields[key] = value
    return fields
