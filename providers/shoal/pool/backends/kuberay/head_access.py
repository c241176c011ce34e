"""How requests reach the Kubernetes API (the service account of a pod, or a kubeconfig file) and Ray's HTTP API (the
head's service, the proxy of the Kubernetes API server, or a given URL).
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, MissingExtraError, PoolUnreachableError
from shoal.pool.backends.kuberay.resources import status_in
from shoal.pool.backends.ray_http import BusyClusterError, Failure, Problem, RayHead
from shoal.pool.endpoint import ca_path
from shoal.pool.spec import PoolSpec

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


_READ_AGAIN_AFTER = 300.0
"""Seconds after which a kubeconfig file is read again, with its `tokenFile` and the programs that give tokens. The
shortest life of a service account's token is 600 s, and some plugins do not say when theirs ends."""

_MOST_WAITS = 3
"""Number of times that a request is sent again after the API has answered that it is too busy (429)."""

_LONGEST_WAIT = 10.0
"""Longest time in seconds to wait before such a request is sent again: the other pools of a reconciler wait as well."""

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
    period = int(monotonic() / _READ_AGAIN_AFTER)
    if in_cluster(spec):
        return _client(None, None, 0, period)
    # $KUBECONFIG may name several files. The official client merges them, so its first file only has to exist.
    given = spec.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    path = Path(given if spec.kubeconfig else given.split(os.pathsep)[0]).expanduser()
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise InvalidArgumentError(
            f'pool "{spec.name}": the kubeconfig file {path} cannot be read: {error.strerror}. Give kubeconfig= in the '
            "pool's URI, or set KUBECONFIG; in a pod, shoal uses the pod's service account"
        ) from None
    return _client(str(path), spec.context, changed, period)


def forget_credentials() -> None:
    """Let the next call of `api_client` read the credentials again, because the API does not accept them any more."""
    _client.cache_clear()


@functools.lru_cache(maxsize=16)
def _client(path: str | None, context: str | None, changed: int, period: int) -> ApiClient:
    """Return the client for a kubeconfig file; None: for the service account of the pod."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise MissingExtraError("kubernetes", "kuberay") from error
    from urllib3.util import Retry

    class Patience(Retry):
        def get_retry_after(self, response: Any) -> float | None:
            asked = super().get_retry_after(response)
            return asked and min(asked, _LONGEST_WAIT)

    configuration = client.Configuration()
    given = os.environ.get("KUBECONFIG", "")
    try:
        if path is None:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=given if given.split(os.pathsep)[0] == path else path,
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, ValueError, LookupError, TypeError) as error:
        file = f"the kubeconfig file {path}" if path else "the service account of this pod"
        chosen = f" with context={context}" if context else ""
        raise InvalidArgumentError(f"{file}{chosen} cannot be used: {error}") from error
    # One lost connection or time-out is no lost API. With more tries, a server that is gone would cost too much time.
    busy = (HTTPStatus.TOO_MANY_REQUESTS,)
    configuration.retries = Patience(_MOST_WAITS, connect=1, read=1, status_forcelist=busy, allowed_methods=None)
    return client.ApiClient(configuration)


_PORT = 8265
"""Port of the head's HTTP API in KubeRay's service."""


def service_url(spec: PoolSpec, service: str) -> str:
    """Return the URL of the head's HTTP API inside of Kubernetes, by which all hosts call the head."""
    return (spec.api or f"http://{service}.{spec.namespace}.svc:{_PORT}").rstrip("/")


@dataclass(frozen=True)
class ApiServerProxy:
    """Way to the head through the proxy of the Kubernetes API server.

    Attributes:
        spec: The pool.
        service: Name of the head's service.
    """

    spec: PoolSpec
    service: str

    @property
    def target(self) -> str:
        """Return the name under which rights to the proxy are given."""
        return f"http:{self.service}:{_PORT}"

    @property
    def url(self) -> str:
        """Return the URL of the proxy."""
        server = api_client(self.spec).configuration.host.rstrip("/")
        return f"{server}/api/v1/namespaces/{self.spec.namespace}/services/{self.target}/proxy"

    def headers(self, token: str) -> Mapping[str, str]:
        """Return the headers with the credentials of Kubernetes, and Ray's token in a header of its own, because the
        API server does not pass `Authorization` on."""
        # `auth_settings` renews a token that has expired.
        bearer = api_client(self.spec).configuration.auth_settings().get("BearerToken")
        mine = {"Authorization": bearer["value"]} if bearer and bearer.get("value") else {}
        return {**mine, **({"X-Ray-Authorization": f"Bearer {token}"} if token else {})}

    def certificates(self) -> ssl.SSLContext:
        """Return the certificates of the kubeconfig file."""
        configuration = api_client(self.spec).configuration
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if not configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        return context


def access(spec: PoolSpec, service: str) -> ApiServerProxy | None:
    """Return the way of this process to the head; None if it reaches `service_url` itself."""
    return None if spec.api or in_cluster(spec) else ApiServerProxy(spec, service)


def ray_head(spec: PoolSpec, service: str, token: str) -> RayHead:
    """Return the client of the head's HTTP API."""
    url = service_url(spec, service)

    def error_of(failure: Failure) -> PoolUnreachableError:
        head, said = f"the Ray head of RayCluster {spec.namespace}/{spec.ray_cluster}", failure.reason
        if answer := status_in(said):  # of the API server, through whose proxy requests go
            if failure.status == HTTPStatus.UNAUTHORIZED:
                forget_credentials()
            said = f"the Kubernetes API says: {answer.get('message')}"
        elif failure.problem is Problem.TOKEN_REFUSED:
            said = f"the Secret has another token than Ray: {said}"
        elif failure.problem is Problem.NOT_RAY:
            said = f"the answer is not that of Ray: {said}"
        place = f'{head} at {url}, as api= in the URI of pool "{spec.name}" says,' if spec.api else head
        status = f"{failure.status}: " if failure.status else ""
        kind = BusyClusterError if failure.problem is Problem.BUSY else PoolUnreachableError
        return kind(f"{place} does not answer ({status}{said})")

    return RayHead(url, token, ca=ca_path(spec), error=error_of, access=access(spec, service))
