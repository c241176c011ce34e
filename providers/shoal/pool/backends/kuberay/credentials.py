"""How this process reaches the Kubernetes API: the service account of its pod, or a kubeconfig file."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, MissingExtraError
from shoal.pool.spec import PoolSpec

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def in_cluster(spec: PoolSpec) -> bool:
    """Return whether this process runs in a pod and uses the service account of the pod."""
    given = spec.kubeconfig or spec.context
    return not given and "KUBERNETES_SERVICE_HOST" in os.environ and _SERVICE_ACCOUNT.is_file()


def api_client(spec: PoolSpec) -> ApiClient:
    """Return the client of the Kubernetes API for a pool. The client renews its credentials itself.

    Raises:
        MissingExtraError: The client is not installed.
        InvalidArgumentError: The kubeconfig file does not exist or has no such context.
    """
    if in_cluster(spec):
        return _client_of_pod()
    path = _kubeconfig(spec)
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise InvalidArgumentError(
            f'pool "{spec.name}": the kubeconfig file {path} cannot be read: {error.strerror}. Give kubeconfig= in the '
            "pool's URI, or set KUBECONFIG; in a pod, shoal uses the pod's service account"
        ) from None
    return _client_of_file(str(path), spec.context, changed)


def _kubeconfig(spec: PoolSpec) -> Path:
    # $KUBECONFIG may name several files. The official client merges them, so its first file only has to exist.
    given = spec.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    return Path(given if spec.kubeconfig else given.split(os.pathsep)[0]).expanduser()


@functools.lru_cache(maxsize=1)
def _client_of_pod() -> ApiClient:
    config, client = _modules()
    configuration = client.Configuration()
    config.load_incluster_config(client_configuration=configuration)
    return _client(configuration)


@functools.lru_cache(maxsize=16)
def _client_of_file(path: str, context: str | None, changed: int) -> ApiClient:
    config, client = _modules()
    configuration = client.Configuration()
    given = os.environ.get("KUBECONFIG", "")
    try:
        config.load_kube_config(
            config_file=given if given.split(os.pathsep)[0] == path else path,
            context=context,
            client_configuration=configuration,
            persist_config=False,
        )
    except (config.ConfigException, ValueError, LookupError, TypeError) as error:
        chosen = f" with context={context}" if context else ""
        raise InvalidArgumentError(f"the kubeconfig file {path}{chosen} cannot be used: {error}") from error
    return _client(configuration)


def _client(configuration: Any) -> ApiClient:
    client = _modules()[1]
    # Without this setting, a request to a server that is gone takes four times as long. The caller tries again itself.
    configuration.retries = 0
    made: ApiClient = client.ApiClient(configuration)
    return made


def _modules() -> tuple[Any, Any]:
    """Return the modules `config` and `client` of the official client. Only `kuberay://` pools import them."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise MissingExtraError("kubernetes", "kuberay") from error
    return config, client
