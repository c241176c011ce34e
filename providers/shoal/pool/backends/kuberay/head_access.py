"""How requests reach Ray's HTTP API: the head's service, the proxy of the Kubernetes API server, or a given URL."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from shoal.errors import PoolUnreachableError
from shoal.pool.backends.kuberay.credentials import api_client, forget_credentials, in_cluster
from shoal.pool.backends.kuberay.resources import status_in
from shoal.pool.backends.ray.token_file import ca_path
from shoal.pool.backends.ray_http import Failure, Problem, RayHead
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import CLUSTER_JOB_PATIENCE, CLUSTER_PATIENCE


class TokenRefusedError(PoolUnreachableError):
    """Ray's head or the API server refused the credentials."""


class _BusyHeadError(PoolUnreachableError):
    """The head could not answer at this time. Shortly after its start, a head accepts no jobs."""


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
    return RayHead(
        service_url(spec, service),
        token,
        ca=ca_path(spec),
        timeout_s=CLUSTER_PATIENCE,
        retrying=Retrying(
            retry=retry_if_exception_type(_BusyHeadError),
            stop=stop_after_delay(CLUSTER_JOB_PATIENCE),
            wait=wait_fixed(0.5),
            reraise=True,
        ),
        error=lambda failure: _error(spec, service_url(spec, service), failure),
        access=access(spec, service),
    )


def _error(spec: PoolSpec, url: str, failure: Failure) -> PoolUnreachableError:
    head = f"the Ray head of RayCluster {spec.namespace}/{spec.ray_cluster}"
    place = f'{head} at {url}, as api= in the URI of pool "{spec.name}" says,' if spec.api else head
    if answer := status_in(failure.reason):  # of the API server, whose proxy leads to the head
        if failure.status == HTTPStatus.UNAUTHORIZED:
            forget_credentials()
        said = f"the Kubernetes API does not lead to {head} ({failure.status}: {answer.get('message')})"
        return _BusyHeadError(said) if failure.problem is Problem.BUSY else PoolUnreachableError(said)
    match failure.problem:
        case Problem.TOKEN_REFUSED:
            return TokenRefusedError(
                f"{place} refuses Ray's token ({failure.status}: {failure.reason}): the Secret has another token"
            )
        case Problem.BUSY:
            return _BusyHeadError(f"{place} cannot answer now ({failure.status}: {failure.reason})")
        case Problem.REFUSED | Problem.NOT_RAY:
            return PoolUnreachableError(f"{place} does not answer as Ray does ({failure.status}: {failure.reason})")
    return PoolUnreachableError(f"{place} does not answer ({failure.reason})")
