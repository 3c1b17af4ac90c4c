"""Server 1 dies by itself in its first life: it has counted a push, and has not said so to the worker.

By ``DIES`` it has told nobody ("counted"), or the server with its copy has told it that the push is there ("copied");
``DIES_AT`` is the version that it has made then.
Servers import it as their server module, which has to register something.
"""

import os
import signal

from kvdist import kv
from kvdist.core.server import replica, shard

AT = int(os.environ["DIES_AT"])
has_counted = False


def die():
    os.write(1, f"server-1 dies when version {AT} is {os.environ['DIES']}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def close_if_ready(self, holder):
    global has_counted
    closed(self, holder)
    if self.peers.name == "server-1" and holder.round.version >= AT:
        has_counted = True
        if os.environ["DIES"] == "counted":
            die()


def replicated(self, count):
    if os.environ["DIES"] == "copied" and has_counted and count == self._told and self._held:  # answers to workers
        die()
    return heard(self, count)


if "KVDIST_RESTARTS" not in os.environ:
    closed, shard.Shard.close_if_ready = shard.Shard.close_if_ready, close_if_ready
    heard, replica.ReplicatedServer._replicated = replica.ReplicatedServer._replicated, replicated


@kv.register_command(1)
def do_nothing(head, body, rank):
    """A command for the tests."""
