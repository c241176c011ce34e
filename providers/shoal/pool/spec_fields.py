"""Fields of a pool's settings: those that `PoolSpec` and the Prefect block `ComputePool` have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.option_validation import later_option
from shoal.pool.names import NAME_RULE

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
