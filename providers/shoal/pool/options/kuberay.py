"""Options of pools on Kubernetes."""

from __future__ import annotations

import re
from typing import ClassVar

from shoal.errors import shown
from shoal.option_validation import Memory, later_option
from shoal.pool.options.base import ClusterOptions

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Pattern of the names of Kubernetes namespaces, RayClusters and worker groups."""


class KubeRayOptions(ClusterOptions):
    """Options of a kuberay:// pool."""

    backend_class: ClassVar[str] = "shoal.pool.backends.kuberay.backend:KubeRayBackend"

    place: ClassVar[tuple[str, ...]] = ("namespace", "name")

    namespace: str | None = later_option(
        "Kubernetes namespace of the RayCluster, the first part of a kuberay:// URI. Required for kuberay:// pools, "
        "and allowed only for them."
    )
    cluster: str | None = later_option(
        "Name of the RayCluster, if it is not the pool's name. Allowed only for kuberay:// pools."
    )
    group: str | None = later_option(
        "Name of the RayCluster's worker group whose pods are nodes of the pool. Other groups are left as they are. "
        "Default: the only group. Allowed only for kuberay:// pools."
    )
    kubeconfig: str | None = later_option(
        "Path of the kubeconfig file. Default: the service account of the pod in which shoal runs; outside of "
        "Kubernetes, $KUBECONFIG or ~/.kube/config. Allowed only for kuberay:// pools."
    )
    context: str | None = later_option(
        "Context of the kubeconfig file. Default: its current context. Allowed only for kuberay:// pools."
    )
    api: str | None = later_option(
        "URL of the HTTP API of the Ray head, such as that of an ingress. Default: the head's service inside of "
        "Kubernetes, and the proxy of the Kubernetes API server outside. Allowed only for kuberay:// pools."
    )

    image: str | None = later_option(
        "Container image of the nodes. shoal then creates the RayCluster when the pool comes up, and deletes it when "
        "the pool goes down. Default: the RayCluster exists, unless `template` is given. Allowed only for kuberay:// "
        "pools."
    )
    template: str | None = later_option(
        "Path of a YAML or JSON file with a RayCluster, from which shoal creates one as with `image`: for volumes, "
        "node selectors, tolerations, sidecars. Each host that starts nodes needs the file. Allowed only for "
        "kuberay:// pools."
    )
    memory_per_node: Memory | None = later_option(
        "Memory of each node as Kubernetes writes it, such as 16Gi. Default: 4Gi. Allowed only with `image`."
    )
    service_account: str | None = later_option(
        "Kubernetes service account of the nodes. Default: that of the namespace. Allowed only with `image`."
    )
    env_secret: str | None = later_option(
        "Kubernetes Secret whose entries are environment variables of the nodes, such as SHOAL_STATE_URL. Default: "
        "none. Allowed only with `image`."
    )
    queue: str | None = later_option(
        "Kueue queue that admits the RayCluster. Default: none. Allowed only with `image` or `template`."
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
        if self.template is not None and not self.template.startswith("/"):
            raise ValueError(f"template={shown(self.template)} is not an absolute path: begin the path with /")
        if self.image and self.group not in (None, "workers"):
            raise ValueError(f"group={self.group}: the RayCluster of image= has one group, workers; remove group")
