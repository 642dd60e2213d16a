"""Encrypts blocks at rest: AES-256-GCM, a nonce of its own for each, under a key from a file or the environment.

The block's name and namespace are authenticated with it, so that no block can be passed off as another. Nonces are 96
random bits: NIST SP 800-38D allows 2^32 blocks a key, 6 PB at 1.4 MiB. `cryptography` is loaded where a key is set.
"""

from __future__ import annotations

import os
import re
import stat
from base64 import b64decode
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from pydantic import model_validator

from flowinfer.errors import FlowInferError
from flowinfer.stage import StageConfig

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
Buffer = memoryview


class EncryptionConfig(StageConfig):
    """key_file: a file of this user alone, or key_env: the environment variable, that holds the key.

    32 bytes: as they are (a file of 32 bytes), as 64 hex digits, or in base64. `openssl rand -hex 32` makes one.
    """

    key_file: str | None = None
    key_env: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> EncryptionConfig:
        if (self.key_file is None) == (self.key_env is None):
            raise ValueError("encryption takes one of key_file and key_env")
        return self

    def read_key(self) -> bytes:
        """The key. Raises FlowInferError saying what is wrong with it, never the key itself."""
        if self.key_file is not None:
            return parse_key(_read(Path(self.key_file).expanduser()), self.key_file)
        assert self.key_env is not None, "validated"
        if not (text := os.environ.get(self.key_env)):
            raise FlowInferError(f"${self.key_env}, which should hold the cache's key, isn't set.")
        return parse_key(text.encode(), f"${self.key_env}")


class Seal(NamedTuple):
    """How a block was encrypted: which key (8 bytes of its digest), and the nonce."""

    key_id: bytes
    nonce: bytes


class Sealer:
    """Seals and opens blocks under one key. Thread-safe. A sealed block is TAG_BYTES longer."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise FlowInferError(
                "encryption of the cache needs the package cryptography.", help="pip install 'flowinfer[encryption]'"
            ) from error
        self._aead = AESGCM(key)
        self.key_id = blake2b(key, digest_size=8, person=b"flowinfer-key-id").digest()

    def seal(self, plain: Buffer, into: Buffer, *, name: bytes, namespace: str) -> Seal:
        """Fills `into`, TAG_BYTES longer than `plain`."""
        nonce = os.urandom(NONCE_BYTES)
        self._aead.encrypt_into(nonce, plain, _bound(name, namespace), into)
        return Seal(self.key_id, nonce)

    def open(self, sealed: Buffer, into: Buffer, seal: Seal, *, name: bytes, namespace: str) -> bool:
        """Fills `into`; False, with `into` holding anything, where the block isn't what was sealed under this name."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(seal.nonce, sealed, _bound(name, namespace), into)
        except InvalidTag:
            return False
        return True


def parse_key(text: bytes, where: str) -> bytes:
    """32 bytes of key. Raises FlowInferError."""
    if len(text) == KEY_BYTES:
        return text
    words = text.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", words):
        return bytes.fromhex(words.decode())
    try:
        key = b64decode(words, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise FlowInferError(f"{where} holds no key of 32 bytes.", help="Make one: openssl rand -hex 32")
    return key


def _read(path: Path) -> bytes:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise FlowInferError(f"others may read the key in {path}.", help=f"chmod 600 {path}")
        return path.read_bytes()
    except OSError as error:
        raise FlowInferError(f"the cache's key can't be read: {path}: {error.strerror}.") from error


def _bound(name: bytes, namespace: str) -> bytes:
    return name + namespace.encode()
