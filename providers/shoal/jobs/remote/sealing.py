"""Encrypt the credentials of an attempt so that only its driver can read them.

The driver generates a new X25519 key when it starts, and writes the public key into the attempt's row. The submitter
generates another key for each message, derives an AES-GCM key from both keys (HKDF-SHA256), and writes the ciphertext
into the row. AES-GCM also authenticates the job, the attempt and both public keys. So a driver can decrypt only
messages for its own attempt and its own key, and a copy of the row cannot be decrypted after the driver has ended.
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from shoal.errors import JobError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

_PURPOSE = b"shoal credentials 1"
_KEY_BYTES = 32
_NONCE_BYTES = 12


class SealError(JobError):
    """Error for encrypted credentials that are for another attempt or another driver, or that were changed."""


class DriverKey:
    """Key pair of one driver. The private key exists only in this object.

    Attributes:
        public: The public key, as text for the attempt's row.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = b64encode(self._private.public_key().public_bytes_raw()).decode()

    def open(self, sealed: str, submission_id: str) -> bytes:
        """Decrypt a message that :func:`seal` has encrypted for this driver.

        Raises:
            SealError: The message is for another attempt or another driver, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            message = b64decode(sealed, validate=True)
            sender, nonce = message[:_KEY_BYTES], message[_KEY_BYTES : _KEY_BYTES + _NONCE_BYTES]
            bound = _bound(submission_id, sender, b64decode(self.public))
            key = _key(self._private, X25519PublicKey.from_public_bytes(sender), bound)
            return AESGCM(key).decrypt(nonce, message[_KEY_BYTES + _NONCE_BYTES :], bound)
        except (InvalidTag, ValueError, binascii.Error):
            raise SealError(
                "the credentials in the attempt's row were not encrypted for this attempt and this driver, or were "
                "changed: find out which process writes to the store, and submit the job again"
            ) from None


def seal(content: bytes, driver_key: str, submission_id: str) -> str:
    """Encrypt a text so that only one driver can decrypt it.

    Raises:
        SealError: The row contains no valid key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        receiver = b64decode(driver_key, validate=True)
        public = X25519PublicKey.from_public_bytes(receiver)
        own = X25519PrivateKey.generate()
        sender = own.public_key().public_bytes_raw()
        bound = _bound(submission_id, sender, receiver)
        key = _key(own, public, bound)
    except (ValueError, binascii.Error):
        raise SealError("the attempt's row contains no valid driver key: submit the job again") from None
    nonce = os.urandom(_NONCE_BYTES)
    return b64encode(sender + nonce + AESGCM(key).encrypt(nonce, content, bound)).decode()


def _key(own: X25519PrivateKey, other: X25519PublicKey, bound: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=bound).derive(own.exchange(other))


def _bound(submission_id: str, sender: bytes, receiver: bytes) -> bytes:
    """Return the data that AES-GCM authenticates with a message: the attempt's id, and the public keys of sender and
    driver."""
    return _PURPOSE + sender + receiver + submission_id.encode()
