"""CURVE keys and authentication: a key pair for every name of the cluster, derived from the secret of the job.

Only the secret is distributed: each process derives its keys and those of all others, so a process that has the secret
can be any process of the job. CURVE alone encrypts and accepts every key; `ZapAuthenticator` accepts only the keys of
the cluster and identifies the process of each, so that a message can be compared with the name of its connection.

The authenticator is polled with the other sockets. A separate thread, or pyzmq's authenticator, which is awaited, could
die unnoticed. libzmq would then accept everyone, but with ``ZAP_ENFORCE_DOMAIN`` it accepts no one.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvdist.nodes import NodeId

ZAP_DOMAIN = b"kvdist"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
KEY_BYTES = 32
SALT = b"kvdist 1"


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    """Derive `nbytes` key bytes from a secret: RFC 5869 with SHA-256."""
    root = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    made = block = b""
    for number in range(1, -(-nbytes // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(root, block + info + bytes([number]), "sha256")
        made += block
    return made[:nbytes]


@dataclass(frozen=True)
class Credentials:
    """The identity and keys with which a process connects to its cluster."""

    me: NodeId
    secret: bytes = field(repr=False)
    """The secret of the job, the same in all its processes."""
    peers: frozenset[NodeId] = field(repr=False)
    """The processes that may dial this process."""

    def secret_key(self, node: NodeId) -> bytes:
        """The Curve25519 secret key of a name, in Z85 text as libzmq wants it."""
        return bytes(z85.encode(hkdf_sha256(self.secret, SALT, f"curve/{node}".encode(), KEY_BYTES)))

    def public_key(self, node: NodeId) -> bytes:
        """The public key of a name, in Z85 text."""
        return zmq.curve_public(self.secret_key(node))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Require CURVE and ZAP authentication of a socket that has not been bound yet."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.secret_key(self.me))
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def introduce(self, socket: zmq.Socket[bytes], to: NodeId) -> None:
        """Let a socket that has not dialled yet show the key of this process, and speak only with `to`."""
        key = self.secret_key(self.me)
        socket.set(zmq.CURVE_SECRETKEY, key)
        socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(key))
        socket.set(zmq.CURVE_SERVERKEY, self.public_key(to))


class ZapAuthenticator:
    """Answers libzmq's requests about every key shown at a guarded socket of the context (ZAP, RFC 27).

    Attributes:
        socket: receives libzmq's requests; poll it.
        names: the identity that messages of a connection carry → the process.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], credentials: Credentials) -> None:
        self.names = {str(node): node for node in credentials.peers}
        self._names_of_keys = {
            z85.decode(credentials.public_key(node)): name.encode() for name, node in self.names.items()
        }
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer all requests. Never raises: a key that cannot be identified is refused."""
        while self.socket.poll(0):
            request = self.socket.recv_multipart()
            name = self._name_of(request)
            number = request[1] if len(request) > 1 else b""
            code, text = (b"400", b"no process of this job has this key") if name is None else (b"200", b"OK")
            self.socket.send_multipart([b"1.0", number, code, text, name or b"", b""])

    def _name_of(self, request: list[bytes]) -> bytes | None:
        """The identity for a request: version, number, domain, address, routing id, mechanism and the 32-byte key."""
        if len(request) != 7 or request[0] != b"1.0" or request[2] != ZAP_DOMAIN or request[5] != b"CURVE":
            return None
        return self._names_of_keys.get(request[6])

    def close(self) -> None:
        self.socket.close(0)
