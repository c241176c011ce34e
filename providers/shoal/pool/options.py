"""Options of pools: those of all pools, those of each backend with their check, and all of them as one flat object.

DAG files import this module, so it needs neither the store nor an HTTP client.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, Field

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.errors import InvalidArgumentError, shown
from shoal.option_validation import later_option
from shoal.secrets.redaction import has_credentials, redact_address, redact_value

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_RULE = "1 to 40 of a-z, 0-9 and -, starting and ending with a letter or digit (URI hosts are lower-cased)"
"""Description of the valid names of pools, for error messages and help texts."""


def is_pool_name(text: str) -> bool:
    """Check whether a text is a valid pool name."""
    return _NAME.fullmatch(text) is not None


def items(value: str | None) -> list[str]:
    """Split the value of an option at its commas."""
    return [item.strip() for item in (value or "").split(",") if item.strip()]


def url_parts(url: str) -> SplitResult | None:
    """Split a URL into its parts. Return None if the text is not a URL."""
    try:
        parts = urlsplit(url)
        # `urlsplit` does not check the port. Only reading `parts.port` raises ValueError if the port is invalid.
        _ = parts.port
    except ValueError:
        return None
    return parts


def is_loopback(host: str) -> bool:
    """Return whether a hostname or IP address is a loopback address, such as localhost or 127.0.0.1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class PoolOptions(BaseModel):
    """Options of all pools. A subclass has the options of one backend."""

    place: ClassVar[tuple[str, ...]] = ("name",)
    """Fields that make up the URI of a pool before its options."""

    name: str = Field(description=f"Name of the pool: {NAME_RULE}.")
    backend: str = "local"
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

    only_team: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="Team to which the pool belongs. Other teams, and processes without a team, can neither use nor "
        "change the pool. Default: the pool belongs to no team, and all may use it.",
    )

    def check_options(self) -> None:
        """Raise an error if options of this backend are missing or do not fit together."""


class ClusterOptions(PoolOptions):
    """Options of all pools whose nodes belong to a Ray cluster that shoal does not run."""

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

    def shared(self) -> list[str]:
        """Return the folders in the option `shared_folders` as a list."""
        return items(self.shared_folders)

    def check_cluster(self, field: str, *, is_needed: bool, cure: str, wanted: str) -> None:
        """Raise an error if the URL of the cluster is wrong, or if options do not fit to it or to a cluster.

        Args:
            field: Name of the option with the URL.
            is_needed: Whether the URL has to be given.
            cure: What to do with credentials in the URL.
            wanted: What the URL has to be.
        """
        given: Mapping[str, Any] = vars(self)
        if not given["ray"]:
            raise ValueError("ray=false is allowed only for local:// pools: remove the option")
        for name in ("ray_dashboard", "libraries", "python"):
            if given[name]:
                raise ValueError(f"{name} is allowed only for local:// pools: remove the option")
        if self.gpus_per_node < 0:
            raise ValueError("gpus_per_node=-1 is allowed only for local:// pools: give the number of GPUs")
        url = given[field] or ""
        if has_credentials(url):
            raise InvalidArgumentError(f"{field}={redact_value(url)}: the URL must not contain credentials; {cure}")
        parts = url_parts(url)
        is_url = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        if not is_url and (url or is_needed):
            raise ValueError(f"{field}={redact_address(url)!r}: {wanted}")
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

    def check_url_of_token(self, url: str | None) -> None:
        """Raise an error if the pool would send its token to a URL without encryption and to another host, unless
        `token_over_http` allows this.

        Raises:
            InvalidArgumentError: The token would be sent without encryption, so other users of the network could read
                the token and use it to run code.
        """
        parts = url_parts(url or "")
        if self.token_over_http == "allow" or parts is None or parts.scheme != "http":
            return
        if not is_loopback(parts.hostname or ""):
            raise InvalidArgumentError(
                f'pool "{self.name}" would send its token to {url} without encryption, so other users of the '
                "network could read the token: use an https:// address (with ca_file for a private certificate "
                "authority), or set token_over_http=allow if you trust the network"
            )


LIBRARIES = (*BOOSTING_LIBRARIES, "mlflow", "torch")
"""Values of `LocalOptions.libraries`."""


class LocalOptions(PoolOptions):
    """Options of a local:// pool."""

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
        "MLflow database if there is none. torch needs ray=false. Default: none; the first job that needs a library "
        "imports it for all jobs.",
    )

    python: str | None = Field(
        default=None,
        description="Path of the Python interpreter that runs the nodes and jobs of a local:// pool, such as "
        "/opt/train/bin/python of an environment with other libraries than Airflow's. Install the same version of "
        "shoal there. Default: the interpreter of the process that starts the pool.",
    )

    def library_names(self) -> list[str]:
        """Return the libraries in the option `libraries` as a list."""
        return items(self.libraries)

    def check_options(self) -> None:
        """Raise an error if a library is unknown, or if options do not fit to a pool without Ray."""
        if not self.ray and self.gpus_per_node:
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} is not allowed with ray=false, because only Ray divides GPUs "
                "among workers: remove one of the two options"
            )
        if not self.ray and self.ray_dashboard:
            raise ValueError("ray_dashboard=true is not allowed with ray=false: remove one of the two options")
        if unknown := [name for name in self.library_names() if name not in LIBRARIES]:
            raise ValueError(f"libraries={self.libraries}: {unknown[0]} is not one of {', '.join(LIBRARIES)}")
        if self.ray and "torch" in self.library_names():
            raise ValueError("libraries=torch is allowed only with ray=false: with Ray, each job imports it itself")
        if self.python is not None and not self.python.startswith("/"):
            raise ValueError(f"python={self.python} is not an absolute path: begin the path with /")


class RayOptions(ClusterOptions):
    """Options of a ray:// pool."""

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

    def check_options(self) -> None:
        """Raise an error if the URL of the cluster is missing or wrong."""
        self.check_cluster(
            "address",
            is_needed=True,
            cure="put the token in a file and give token_file=",
            wanted=f"a ray:// pool needs the URL of the cluster's Job API, for example ray://{self.name}"
            "?address=http://10.0.0.5:8265",
        )


_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Pattern of the names of Kubernetes namespaces, RayClusters and worker groups."""

_MEMORY = re.compile(r"[1-9][0-9]*(Gi|Mi|G|M)")
"""Pattern of an amount of memory, as Kubernetes writes it."""


class KubeRayOptions(ClusterOptions):
    """Options of a kuberay:// pool."""

    place: ClassVar[tuple[str, ...]] = ("namespace", "name")

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

    @property
    def makes_cluster(self) -> bool:
        """Return whether shoal creates and deletes the RayCluster of a kuberay:// pool."""
        return bool(self.image or self.template)

    @property
    def ray_cluster(self) -> str:
        """Return the name of the RayCluster of a kuberay:// pool."""
        return self.cluster or self.name

    def check_options(self) -> None:
        """Raise an error if a name or the URL of the head is wrong, or if the options of the RayCluster that shoal
        creates do not fit together."""
        self.check_cluster(
            "api",
            is_needed=False,
            cure="remove them",
            wanted="it has to be a URL, for example https://ray.example.com",
        )
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


BackendName = Literal["local", "ray", "kuberay"]
"""Name of a backend (a kind of pool). `shoal.pool.backends.BACKENDS` maps each name to its class."""


class PoolFields(KubeRayOptions, RayOptions, LocalOptions):
    """Fields that `PoolSpec` and the Prefect block `ComputePool` have in common: the options of all backends, because
    they are stored, and given in forms, as one flat object."""

    backend: BackendName = Field(
        default="local",
        description="Place where the nodes run: `local` is this machine, `ray` is an existing Ray cluster, `kuberay` "
        "is a Ray cluster on Kubernetes whose size KubeRay's operator changes.",
    )


OPTIONS: dict[BackendName, type[PoolOptions]] = {"local": LocalOptions, "ray": RayOptions, "kuberay": KubeRayOptions}
"""Options of each backend."""
