"""Who is who on an encrypted connection: a key pair for every name of the cluster, out of one secret of the job.

Nothing but the secret is handed out: each process derives its own keys and those of everybody else, so whoever has the
secret can be any process of the job. CURVE alone encrypts but lets everybody in; it is the `Doorkeeper` who asks for a
key of the cluster, and he tells whose it is, so that a message can be held against the name of its connection.

The doorkeeper is polled with the other sockets. A thread for him, or pyzmq's authenticator, which wants to be awaited,
could die unnoticed; libzmq would let everybody in then, but for ``ZAP_ENFORCE_DOMAIN``, with which it lets nobody in.
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
    """As many key bytes as wanted out of a secret: RFC 5869 with SHA-256."""
    root = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    made = block = b""
    for number in range(1, -(-nbytes // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(root, block + info + bytes([number]), "sha256")
        made += block
    return made[:nbytes]


@dataclass(frozen=True)
class Credentials:
    """What a process needs to speak encrypted with its cluster."""

    me: NodeId
    secret: bytes = field(repr=False)
    """The job's, the same in all its processes."""
    peers: frozenset[NodeId] = field(repr=False)
    """Everybody who may dial this process."""

    def secret_key(self, node: NodeId) -> bytes:
        """The Curve25519 secret of a name, as libzmq wants it: Z85 text."""
        return bytes(z85.encode(hkdf_sha256(self.secret, SALT, f"curve/{node}".encode(), KEY_BYTES)))

    def public_key(self, node: NodeId) -> bytes:
        """What everybody may know of it, likewise."""
        return zmq.curve_public(self.secret_key(node))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket, before it binds, accept nobody whom the doorkeeper has not let in."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.secret_key(self.me))
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def introduce(self, socket: zmq.Socket[bytes], to: NodeId) -> None:
        """Let a socket, before it dials, show our key, and speak with nobody but `to`."""
        key = self.secret_key(self.me)
        socket.set(zmq.CURVE_SECRETKEY, key)
        socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(key))
        socket.set(zmq.CURVE_SERVERKEY, self.public_key(to))


class ZapAuthenticator:
    """Answers libzmq, which asks about every key that is shown at a guarded socket of the context (ZAP, RFC 27).

    Attributes:
        socket: where it asks; to be polled.
        names: the text by which a message names its sender → who that is.
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
        """Answer what has been asked. Never raises: whoever cannot be made out stays outside."""
        while self.socket.poll(0):
            request = self.socket.recv_multipart()
            name = self._name_of(request)
            number = request[1] if len(request) > 1 else b""
            code, text = (b"400", b"no process of this job has this key") if name is None else (b"200", b"OK")
            self.socket.send_multipart([b"1.0", number, code, text, name or b"", b""])

    def _name_of(self, request: list[bytes]) -> bytes | None:
        """Version, number, domain, address, routing id, mechanism, and the key, in 32 bytes."""
        if len(request) != 7 or request[0] != b"1.0" or request[2] != ZAP_DOMAIN or request[5] != b"CURVE":
            return None
        return self._names_of_keys.get(request[6])

    def close(self) -> None:
        self.socket.close(0)
