"""A job's secret, and the CURVE keys that both ends derive from it.

A process with the secret has both key pairs. The server's public key is never sent, so a peer
without the secret cannot even begin a handshake; and the server accepts only the one client key.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from jaxfleet.errors import StrategyError

LEAST_BYTES = 16
_MAKE_ONE = 'make one: python -c "import secrets; print(secrets.token_hex())" > {0}; chmod 600 {0}'

# Constant, because both ends must derive the same keys.
_SALT = b"jaxfleet parameter servers 1"
_METRICS_SALT = b"jaxfleet metrics 1"


@dataclass(frozen=True)
class Keys:
    """The two key pairs of a job in CURVE's format, 40 characters each."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"


def read_secret(path: str | Path) -> bytes:
    """Reads the secret from a file, stripping surrounding whitespace.

    Raises:
        StrategyError: the file is missing, accessible to other users or owned by one, or the secret
            is too short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            secret = file.read().strip()
    except OSError as error:
        hint = _MAKE_ONE.format(path)
        raise StrategyError(f"the secret's file cannot be read: {error}", hint=hint) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"others than its owner may use the secret's file '{path}', whose mode is {mode:o}"
        raise StrategyError(what, hint=f"chmod 600 {path}")
    if found.st_uid not in {0, os.geteuid()}:
        what = f"the secret's file '{path}' belongs to user {found.st_uid}, who can change it"
        raise StrategyError(what, hint="use a file of your own")
    check_secret(secret)
    return secret


def check_secret(secret: bytes) -> None:
    """Rejects a secret that is short enough to guess."""
    if len(secret) < LEAST_BYTES:
        raise StrategyError(
            f"a secret has at least {LEAST_BYTES} bytes, and this one has {len(secret)}",
            hint=_MAKE_ONE.format("FILE"),
        )


def derive_keys(secret: bytes) -> Keys:
    """Derives a job's keys, deliberately slowly to hinder guessing."""
    check_secret(secret)
    both = _stretched(secret, _SALT)
    server, client = (z85.encode(half) for half in (both[:32], both[32:]))
    return Keys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def metrics_token(secret: bytes) -> str:
    """Derives the bearer token of a job's metrics, which does not reveal the secret."""
    check_secret(secret)
    return _stretched(secret, _METRICS_SALT).hex()


def _stretched(secret: bytes, salt: bytes) -> bytes:
    """Derives 64 bytes from a secret, deliberately slowly to hinder guessing."""
    return hashlib.scrypt(secret, salt=salt, n=1 << 14, r=8, p=1, dklen=64)
