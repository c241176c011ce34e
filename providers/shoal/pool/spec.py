"""Pool specifications (as URI, `PoolSpec`, Airflow connection or Prefect block) and the options of scaling."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.errors import InvalidArgumentError, shown
from shoal.option_validation import Settings, later_option, unknown_value
from shoal.pool.timeouts import ROLLBACK_AFTER
from shoal.secrets.redaction import has_credentials, redact_address, redact_value

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_RULE = "1 to 40 of a-z, 0-9 and -, starting and ending with a letter or digit (URI hosts are lower-cased)"
"""Description of the valid names of pools, for error messages and help texts."""


def is_pool_name(text: str) -> bool:
    """Check whether a text is a valid pool name."""
    return _NAME.fullmatch(text) is not None


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


LIBRARIES = (*BOOSTING_LIBRARIES, "mlflow")
"""Values of `PoolSpec.libraries`."""

RAY_FIELDS = ("address", "gcs", "token_file", "ca_file", "token_over_http", "shared_folders")
"""Options that are allowed only for `ray://` pools, except those of `KUBERAY_FIELDS`."""

MADE_FIELDS = ("image", "template", "memory_per_node", "service_account", "env_secret", "queue")
"""Options of the RayCluster that shoal creates for a `kuberay://` pool."""

KUBERAY_FIELDS = (
    "namespace", "cluster", "group", "kubeconfig", "context", "api", "ca_file", "token_over_http", "shared_folders",
    *MADE_FIELDS,
)  # fmt: skip
"""Options that only `kuberay://` pools have, or that they have in common with `ray://` pools."""

BackendName = Literal["local", "ray", "kuberay"]
"""Name of a backend (a kind of pool). `shoal.pool.backends.BACKENDS` maps each name to its class."""


class PoolFields(BaseModel):
    """Fields that `PoolSpec` and the Prefect block `ComputePool` have in common."""

    name: str = Field(description=f"Name of the pool: {NAME_RULE}.")
    backend: BackendName = Field(
        default="local",
        description="Place where the nodes run: `local` is this machine, `ray` is an existing Ray cluster, `kuberay` "
        "is a Ray cluster on Kubernetes whose size KubeRay's operator changes.",
    )
    min_nodes: int = Field(
        default=1, ge=1, description="Smallest number of nodes while the pool is up, including the head node."
    )
    max_nodes: int = Field(
        default=4, ge=1, le=1000, description="Largest number of nodes of the pool, including the head node."
    )
    cpus_per_node: int = Field(default=1, ge=1, le=1024, description="Number of CPUs that each node offers.")
    gpus_per_node: int = Field(
        default=0,
        ge=-1,
        le=64,
        description="Number of GPUs that each node offers. -1: all GPUs of this machine that no other node uses "
        "when the node starts; only for local:// pools.",
    )
    object_store_mb: int = Field(
        default=128, ge=80, description="Size in MB of each node's object store, the shared memory for Ray's objects."
    )
    # one day: a pool that is used every day stays up, but a forgotten pool goes down
    idle_timeout: float | None = Field(
        default=24 * 3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without a job, lease or request after which the pool goes down. "
        "With `none`, an idle pool stays up.",
    )

    ray: bool = Field(
        default=True,
        description="Whether the nodes of a local:// pool run Ray. A pool without Ray has no GPUs, starts in a second "
        "or two, and takes less memory. The workers of its jobs are plain processes.",
    )

    ray_dashboard: bool = Field(
        default=False,
        description="Whether the head of a local:// pool runs Ray's dashboard, with Ray's Job API and state API. "
        "The dashboard takes memory and makes the start slower, and shoal's jobs do not need it.",
    )

    libraries: str | None = Field(
        default=None,
        description=f"Libraries, separated by commas, that the head of a local:// pool imports while the pool starts, "
        f"so that the first job starts sooner: {', '.join(LIBRARIES)}. With mlflow, the head also creates shoal's own "
        "MLflow database if there is none. Default: none; the first job that needs a library imports it for all jobs.",
    )

    python: str | None = Field(
        default=None,
        description="Path of the Python interpreter that runs the nodes and jobs of a local:// pool, such as "
        "/opt/train/bin/python of an environment with other libraries than Airflow's. Install the same version of "
        "shoal there. Default: the interpreter of the process that starts the pool.",
    )

    only_team: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="Team to which the pool belongs. Other teams, and processes without a team, can neither use nor "
        "change the pool. Default: the pool belongs to no team, and all may use it.",
    )

    address: str | None = Field(
        default=None,
        description="URL of the Job API of the existing Ray cluster, such as http://host:8265. "
        "Required for ray:// pools, and allowed only for them.",
    )
    gcs: str | None = Field(
        default=None,
        description="Address (host:port) of the Ray cluster to which Ray drivers connect. "
        "Default: port 6379 of the host in `address`. Allowed only for ray:// pools.",
    )
    token_file: str | None = Field(
        default=None,
        description="Path of a file (mode 0600) that contains the bearer token of the Ray cluster. "
        "A relative path is relative to $SHOAL_HOME. Default: the cluster needs no token. Allowed only for ray:// "
        "pools.",
    )

    ca_file: str | None = Field(
        default=None,
        description="Path of a PEM file with the CA certificates to trust for an https:// `address` or `api`. "
        "A relative path is relative to $SHOAL_HOME. Default: the CA certificates of this machine. "
        "Allowed only for ray:// and kuberay:// pools.",
    )
    token_over_http: Literal["allow"] | None = Field(
        default=None,
        description="`allow`: send the token even to an http:// `address` or `api` on another host, although other "
        "users of the network can read it. Default: such a pool is refused. Allowed only for ray:// and kuberay:// "
        "pools.",
    )
    shared_folders: str | None = Field(
        default=None,
        description="Absolute paths of folders, separated by commas, that all nodes and all hosts that submit jobs "
        "mount at the same path. Jobs may name files there. Default: none, so data and results need URIs. Allowed "
        "only for ray:// and kuberay:// pools.",
    )

    namespace: str | None = later_option(
        None,
        "Kubernetes namespace of the RayCluster, the first part of a kuberay:// URI. Required for kuberay:// pools, "
        "and allowed only for them.",
    )
    cluster: str | None = later_option(
        None, "Name of the RayCluster, if it is not the pool's name. Allowed only for kuberay:// pools."
    )
    group: str | None = later_option(
        None,
        "Name of the RayCluster's worker group whose pods are nodes of the pool. Other groups are left as they are. "
        "Default: the only group. Allowed only for kuberay:// pools.",
    )
    kubeconfig: str | None = later_option(
        None,
        "Path of the kubeconfig file. Default: the service account of the pod in which shoal runs; outside of "
        "Kubernetes, $KUBECONFIG or ~/.kube/config. Allowed only for kuberay:// pools.",
    )
    context: str | None = later_option(
        None,
        "Context of the kubeconfig file. Default: its current context. Allowed only for kuberay:// pools.",
    )
    api: str | None = later_option(
        None,
        "URL of the HTTP API of the Ray head, such as that of an ingress. Default: the head's service inside of "
        "Kubernetes, and the proxy of the Kubernetes API server outside. Allowed only for kuberay:// pools.",
    )

    image: str | None = later_option(
        None,
        "Container image of the nodes. shoal then creates the RayCluster when the pool comes up, and deletes it when "
        "the pool goes down. Default: the RayCluster exists, unless `template` is given. Allowed only for kuberay:// "
        "pools.",
    )
    template: str | None = later_option(
        None,
        "Path of a YAML or JSON file with a RayCluster, from which shoal creates one as with `image`: for volumes, "
        "node selectors, tolerations, sidecars. Each host that starts nodes needs the file. Allowed only for "
        "kuberay:// pools.",
    )
    memory_per_node: str | None = later_option(
        None,
        "Memory of each node as Kubernetes writes it, such as 16Gi. Default: 4Gi. Allowed only with `image`.",
    )
    service_account: str | None = later_option(
        None, "Kubernetes service account of the nodes. Default: that of the namespace. Allowed only with `image`."
    )
    env_secret: str | None = later_option(
        None,
        "Kubernetes Secret whose entries are environment variables of the nodes, such as SHOAL_STATE_URL. Default: "
        "none. Allowed only with `image`.",
    )
    queue: str | None = later_option(
        None, "Kueue queue that admits the RayCluster. Default: none. Allowed only with `image` or `template`."
    )


_ONLY_KUBERAY = tuple(name for name in KUBERAY_FIELDS if name not in RAY_FIELDS)

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Pattern of the names of Kubernetes namespaces, RayClusters and worker groups."""


_MEMORY = re.compile(r"[1-9][0-9]*(Gi|Mi|G|M)")
"""Pattern of an amount of memory, as Kubernetes writes it."""


class PoolSpec(PoolFields, Settings):
    """Settings of a pool: its name, the place where its nodes run, and the number and size of the nodes.

    Raises:
        InvalidArgumentError: Raised by :meth:`parse`; the message names the invalid field.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _not_bool(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name not in ("ray", "ray_dashboard"):
            raise ValueError("true and false are not allowed as values of this option: give a number or a text")
        return value

    @field_validator("idle_timeout", *RAY_FIELDS, *_ONLY_KUBERAY, mode="before")
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
            raise ValueError(f'"{self.name}" is not a valid pool name: {NAME_RULE}')
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes={self.min_nodes} is above max_nodes={self.max_nodes}: change one of the two")
        self._check_backend_of_options()
        if not self.ray:
            self._check_without_ray()
        if unknown := [name for name in self.library_names() if name not in LIBRARIES]:
            raise ValueError(f"libraries={self.libraries}: {unknown[0]} is not one of {', '.join(LIBRARIES)}")
        if self.only_team == "*":
            raise ValueError("only_team=* is not the name of a team: name the team, or remove the option")
        if self.python is not None and not self.python.startswith("/"):
            raise ValueError(f"python={self.python} is not an absolute path: begin the path with /")
        if self.backend != "local":
            self._check_cluster()
        if self.backend == "kuberay":
            self._check_kuberay()
        return self

    def _check_backend_of_options(self) -> None:
        """Raise an error if the spec has options that pools of its kind do not have."""
        allowed = {"local": (), "ray": RAY_FIELDS, "kuberay": KUBERAY_FIELDS}[self.backend]
        for kind, names in (("ray", RAY_FIELDS), ("kuberay", _ONLY_KUBERAY)):
            given = [name for name in names if getattr(self, name) is not None and name not in allowed]
            if given:
                raise ValueError(
                    f"a {self.backend}:// pool has options that are allowed only for {kind}:// pools: "
                    f"{', '.join(given)}; remove these options"
                )

    def _check_kuberay(self) -> None:
        """Raise an error if the spec of a kuberay:// pool has wrong names, or no namespace."""
        if self.namespace is None:
            raise ValueError(
                f"a kuberay:// pool needs a namespace: write kuberay://NAMESPACE/{self.name}, or give the option "
                "namespace"
            )
        for name in ("namespace", "cluster", "group"):
            value = getattr(self, name)
            if value is not None and not _LABEL.fullmatch(value):
                raise ValueError(
                    f"{name}={shown(value)} is no name of Kubernetes: 1 to 63 of a-z, 0-9 and -, starting and ending "
                    "with a letter or digit"
                )
        self._check_made()

    def _check_made(self) -> None:
        """Raise an error if the options of the RayCluster that shoal creates do not fit together."""
        if self.image and self.template:
            raise ValueError("image and template are both given, but the template names its images: remove one")
        of_image = dict.fromkeys(("memory_per_node", "service_account", "env_secret"), ("image",))
        needs = {**of_image, "queue": ("image", "template")}
        for name, others in needs.items():
            if getattr(self, name) and not any(getattr(self, other) for other in others):
                raise ValueError(
                    f"{name} is allowed only with {' or '.join(others)}: shoal changes no RayCluster that others have "
                    "created"
                )
        if self.memory_per_node and not _MEMORY.fullmatch(self.memory_per_node):
            raise ValueError(f"memory_per_node={shown(self.memory_per_node)}: write it as 16Gi or 16G")
        if self.template is not None and not self.template.startswith("/"):
            raise ValueError(f"template={shown(self.template)} is not an absolute path: begin the path with /")
        if self.image and self.group not in (None, "workers"):
            raise ValueError(f"group={self.group}: the RayCluster of image= has one group, workers; remove group")

    @property
    def makes_cluster(self) -> bool:
        """Return whether shoal creates and deletes the RayCluster of a kuberay:// pool."""
        return bool(self.image or self.template)

    @property
    def ray_cluster(self) -> str:
        """Return the name of the RayCluster of a kuberay:// pool."""
        return self.cluster or self.name

    def _check_cluster(self) -> None:
        """Raise an error if the spec of a pool on a Ray cluster has wrong options, or none that it needs."""
        for name in ("ray_dashboard", "libraries", "python"):
            if getattr(self, name):
                raise ValueError(f"{name} is allowed only for local:// pools: remove the option")
        if self.gpus_per_node < 0:
            raise ValueError("gpus_per_node=-1 is allowed only for local:// pools: give the number of GPUs")
        field = "address" if self.backend == "ray" else "api"
        url = getattr(self, field) or ""
        if has_credentials(url):
            token = "put the token in a file and give token_file=" if self.backend == "ray" else "remove them"
            raise InvalidArgumentError(f"{field}={redact_value(url)}: the URL must not contain credentials; {token}")
        parts = _url_parts(url)
        is_url = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        if self.backend == "kuberay" and url and not is_url:
            raise ValueError(f"api={redact_address(url)!r}: it has to be a URL, for example https://ray.example.com")
        if self.backend == "ray" and not is_url:
            raise ValueError(
                f"address={redact_address(url)!r}: a ray:// pool needs the URL of the cluster's Job "
                f"API, for example ray://{self.name}?address=http://10.0.0.5:8265"
            )
        self._check_certificates_and_folders(field, url, parts)

    def _check_certificates_and_folders(self, field: str, url: str, parts: SplitResult | None) -> None:
        if wrong := [folder for folder in self.shared() if not folder.startswith("/")]:
            raise ValueError(
                f"shared_folders={self.shared_folders}: {wrong[0]} is not an absolute path; begin each path with /"
            )
        if self.ca_file is not None and (parts is None or parts.scheme != "https"):
            raise ValueError(
                f"ca_file is allowed only with an https:// address, not with {field}={url!r}: remove "
                "ca_file, or use an https:// address"
            )
        if parts is not None and parts.query:
            raise ValueError(f'{field}={url!r}: the URL must end with the port or path; remove the part after "?"')

    def _check_without_ray(self) -> None:
        """Raise an error if the spec has options that a pool without Ray cannot have."""
        if self.backend != "local":
            raise ValueError("ray=false is allowed only for local:// pools: remove the option")
        if self.gpus_per_node:
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} is not allowed with ray=false, because only Ray divides GPUs "
                "among workers: remove one of the two options"
            )
        if self.ray_dashboard:
            raise ValueError("ray_dashboard=true is not allowed with ray=false: remove one of the two options")

    @classmethod
    def parse(cls, source: str | PoolSpec | Mapping[str, Any]) -> PoolSpec:
        """Build a spec from a URI (``local://retrain?max_nodes=4``), from a mapping of its fields, or from a spec.

        Raises:
            InvalidArgumentError: The backend or an option is unknown, the name is invalid, or a value is out of range.
        """
        if isinstance(source, PoolSpec):
            return source
        return super().parse(_fields_of_uri(source) if isinstance(source, str) else source)

    def check_size(self, size: int, name: str) -> None:
        """Raise an error if a requested number of nodes is above the pool's `max_nodes`.

        The limits of an existing pool may differ from this spec, because `shoal pool alter` changes them. The actual
        limits are checked when the nodes are requested.

        Args:
            size: Requested number of nodes.
            name: Name of the argument, for the message.

        Raises:
            InvalidArgumentError: The number is above `max_nodes`.
        """
        if size > self.max_nodes:
            raise InvalidArgumentError(
                f'{name}={size} is above max_nodes={self.max_nodes} of pool "{self.name}": raise max_nodes in '
                f"{self.uri}, or request at most {self.max_nodes}"
            )

    def shared(self) -> list[str]:
        """Return the folders in the option `shared_folders` as a list."""
        return _items(self.shared_folders)

    def shares(self, path: str) -> bool:
        """Return whether a path is in a folder that the nodes share with all hosts."""
        return any(Path(path).is_relative_to(folder) for folder in self.shared())

    def library_names(self) -> list[str]:
        """Return the libraries in the option `libraries` as a list."""
        return _items(self.libraries)

    def check_token_is_private(self) -> None:
        """Raise an error if the pool would send its token without encryption to another host, unless `token_over_http`
        allows this. Call it for a kuberay:// pool only if its RayCluster has a token.

        Raises:
            InvalidArgumentError: The token would be sent without encryption, so other users of the network could read
                the token and use it to run code.
        """
        url = self.address or self.api or ""
        parts = _url_parts(url)
        if self.token_over_http == "allow" or parts is None or parts.scheme != "http":
            return
        if self.backend == "ray" and self.token_file is None:
            return
        if not is_loopback(parts.hostname or ""):
            raise InvalidArgumentError(
                f'pool "{self.name}" would send its token to {url} without encryption, so other users of the '
                "network could read the token: use an https:// address (with ca_file for a private certificate "
                "authority), or set token_over_http=allow if you trust the network"
            )

    @property
    def uri(self) -> str:
        """Return the URI from which :meth:`parse` builds this spec."""
        given = self.model_dump(exclude_defaults=True, exclude={"name", "backend", "namespace"})
        query = "&".join(f"{key}={_in_uri(value)}" for key, value in given.items())
        place = f"{self.namespace}/{self.name}" if self.backend == "kuberay" else self.name
        return f"{self.backend}://{place}" + (f"?{query}" if query else "")


def _items(value: str | None) -> list[str]:
    """Split the value of an option at its commas."""
    return [item.strip() for item in (value or "").split(",") if item.strip()]


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


def is_uri(source: str) -> bool:
    """Return whether a text is a pool URI, such as ``local://name`` or ``ray://name?address=…``, and not a bare pool
    name."""
    return "://" in source


def is_loopback(host: str) -> bool:
    """Return whether a hostname or IP address is a loopback address, such as localhost or 127.0.0.1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _url_parts(url: str) -> SplitResult | None:
    """Split a URL into its parts. Return None if the text is not a URL."""
    try:
        parts = urlsplit(url)
        # `urlsplit` does not check the port. Only reading `parts.port` raises ValueError if the port is invalid.
        _ = parts.port
    except ValueError:
        return None
    return parts


def _fields_of_uri(uri: str) -> dict[str, Any]:
    parts = _url_parts(uri)
    if parts is None or not parts.scheme or "://" not in uri:
        raise InvalidArgumentError(
            f'"{redact_address(uri)}" is not a pool URI: write, for example, local://retrain?max_nodes=4'
        )
    backends = get_args(BackendName)
    if parts.scheme not in backends:
        raise InvalidArgumentError(
            f'"{redact_address(uri)}": {unknown_value("backend", parts.scheme, " or ".join(map(repr, backends)))}'
        )
    path = parts.path.strip("/")
    is_kuberay = parts.scheme == "kuberay"
    has_path = not path or "/" in path if is_kuberay else bool(path)
    if has_path or parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
        form = "NAMESPACE/NAME" if is_kuberay else "NAME"
        raise InvalidArgumentError(
            f'"{redact_address(uri)}": a pool URI has the form {parts.scheme}://{form}?option=value, without user, '
            f"port{', further path' if is_kuberay else ', path'} or fragment"
        )
    fields: dict[str, Any] = {"backend": parts.scheme, "name": path if is_kuberay else parts.netloc}
    if is_kuberay:
        fields["namespace"] = parts.netloc
    try:
        options = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise InvalidArgumentError(f'"{uri}": the options after "?" cannot be read: {error}') from None
    for key, value in options:
        if key in fields:
            raise InvalidArgumentError(f'"{uri}" contains the option {key} twice: remove one of the two')
        fields[key] = value
    return fields
