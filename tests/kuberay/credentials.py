"""Keys, tokens and kubeconfigs of a control plane."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

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
        """The certificate of the API server, which makes it itself, and of its authority."""
        return self.folder / "apiserver.crt"

    @property
    def server_key(self) -> Path:
        """The key of this certificate."""
        return self.folder / "apiserver.key"

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


def make_credentials(folder: Path) -> Credentials:
    """Make a key and tokens in a folder."""
    folder.mkdir(mode=0o700)
    tokens = {name: secrets.token_hex(16) for name in USERS}
    made = Credentials(folder, tokens)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write(made.account_key, private.decode())
    _write(made.account_public_key, public.decode())
    lines = [f'{tokens[name]},{user},{name},"{group}"' for name, (user, group) in USERS.items()]
    _write(made.token_file, "\n".join(lines) + "\n")
    return made


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
