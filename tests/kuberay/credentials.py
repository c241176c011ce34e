"""Keys, tokens and kubeconfigs of a control plane."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

USERS = {
    "admin": ("admin", "system:masters"),
    "node": ("shoal:nodes", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
}
"""Name of the token here, and name and group of its user."""


@dataclass(frozen=True)
class Credentials:
    """Files below one folder, and the tokens in them."""

    folder: Path
    tokens: dict[str, str]

    @property
    def account_key(self) -> Path:
        """The private key with which tokens of service accounts are signed."""
        return self.folder / "accounts.key"

    @property
    def account_public_key(self) -> Path:
        """The public key of these tokens."""
        return self.folder / "accounts.pub"

    @property
    def token_file(self) -> Path:
        """The tokens, as the API server reads them."""
        return self.folder / "tokens.csv"

    @property
    def server_certificate(self) -> Path:
        """The certificate of the API server and of the nodes' logs, which has no other authority."""
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        """The key of this certificate."""
        return self.folder / "server.key"

    def kubeconfig(self, user: str, server: str) -> Path:
        """Write the kubeconfig of a user."""
        path = self.folder / f"{user}.kubeconfig"
        cluster = {"server": server, "certificate-authority": str(self.server_certificate)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user, "namespace": "default"}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
        }
        _write(path, json.dumps(content))
        return path


def make_credentials(folder: Path, address: str) -> Credentials:
    """Make keys, a certificate for an address, and tokens in a folder."""
    folder.mkdir(mode=0o700)
    made = Credentials(folder, {name: secrets.token_hex(16) for name in USERS})
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write(made.account_key, _private(key))
    _write(made.account_public_key, public.decode())
    lines = [f'{made.tokens[name]},{user},{name},"{group}"' for name, (user, group) in USERS.items()]
    _write(made.token_file, "\n".join(lines) + "\n")
    server_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write(made.server_key, _private(server_key))
    _write(made.server_certificate, _certificate(server_key, address))
    return made


def _certificate(key: rsa.RSAPrivateKey, address: str) -> str:
    """A certificate that is signed with its own key, for the names under which pods know the API server."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal-tests")])
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    subjects = [x509.IPAddress(ip_address(address)), *(x509.DNSName(each) for each in service)]
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.SubjectAlternativeName(subjects), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )


def _private(key: rsa.RSAPrivateKey) -> str:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
