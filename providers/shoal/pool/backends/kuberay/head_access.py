"""How requests reach Ray's HTTP API: the head's service, the proxy of the Kubernetes API server, or a given URL."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from shoal.errors import PoolUnreachableError
from shoal.pool.backends.kuberay.credentials import api_client, forget_credentials, in_cluster
from shoal.pool.backends.kuberay.resources import status_in
from shoal.pool.backends.ray.token_file import ca_path
from shoal.pool.backends.ray_http import BusyClusterError, Failure, Problem, RayHead
from shoal.pool.spec import PoolSpec

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
        error=lambda failure: _error(spec, service_url(spec, service), failure),
        access=access(spec, service),
    )


def _error(spec: PoolSpec, url: str, failure: Failure) -> PoolUnreachableError:
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
