"""How stores without servers get the engine of this process, which the first of them starts.

Three ways of becoming a rank: by the variables of a launcher (`environment`); in a job with servers, whose cluster the
ranks meet through; or else as a process that is alone. Rules:

* A single engine serves everybody: `kvdist.collective.init`, `kvdist.horovod.init` and all stores.
* Who began it ends it: the last store that is closed, if a store was the first to need it, else the program, which may
  also take it over by its `begin`.
* The cluster of a job with servers is not left as long as the engine lives.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from kvdist.collective import basics
from kvdist.collective.engine import CollectiveEngine
from kvdist.collective.process_sets import ProcessSet
from kvdist.config.addresses import local_address_towards, this_machine
from kvdist.config.endpoints import is_loopback
from kvdist.config.environment import Meeting, World, cluster_from_env, has_servers_from_env, placed
from kvdist.config.settings import ClusterConfig
from kvdist.core.policy import SYNC
from kvdist.errors import ConfigError, KvdistError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.runtime.cluster import PROCESS_CLUSTER

LOOPBACK = "127.0.0.1"
ADDRESS_BYTES = 256


class EngineLifecycle:
    """Who uses the engine of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """The handler of a signal may end what it has interrupted."""
        self._stores: WeakKeyDictionary[CollectiveEngine, int] = WeakKeyDictionary()
        """Engine → how many stores have used it."""
        self._open: WeakKeyDictionary[CollectiveEngine, int] = WeakKeyDictionary()
        """Engine → how many of them are open."""
        self._ours: CollectiveEngine | None = None
        """Engine that ends with its last store."""
        self._cluster: KVStore | None = None
        """Holds the cluster through which the ranks have met."""

    def begin(self, process_sets: str | Iterable[ProcessSet | Iterable[int]] | None = None) -> None:
        """Become a rank for the program, until `end`, or stay a rank until then; a second call does nothing.

        Args:
            process_sets: see `kvdist.collective.init`.

        Raises:
            ConfigError: the environment has only half of the variables of a rank, or the job encrypts.
            CollectiveError: the other ranks did not appear in time.
        """
        with self._lock:
            self._ours = None
            if basics.is_initialized():
                return
            config = cluster_from_env() if has_servers_from_env() else None
            if config is None:
                basics.init(None, process_sets)
                return
            if config.encrypts:
                raise ConfigError(
                    "this job is encrypted, but collective operations (gloo, NCCL) cannot encrypt the traffic between"
                    " ranks: start it without a secret on a single machine, with --security none in a trusted network,"
                    " or use 'dist'"
                )
            self._cluster = KVStore(DistBackend("dist", SYNC, PROCESS_CLUSTER.join()))
            try:
                basics.init(met_through(self._cluster, config), process_sets)
            except Exception:
                self.end()
                raise

    def end(self) -> None:
        """Stop being a rank; a second call does nothing."""
        with self._lock:
            basics.shutdown()
            self._ours = None
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                with contextlib.suppress(KvdistError):  # an error of the ranks has been raised already
                    cluster.close()

    def join(self) -> tuple[CollectiveEngine, int, Callable[[], None]]:
        """The engine for a store, the store's number on it, and what to call when it is closed."""
        with self._lock:
            if not basics.is_initialized():
                self.begin()
                self._ours = basics.current()
            engine = basics.current()
            number = self._stores.get(engine, 0)
            self._stores[engine] = number + 1
            self._open[engine] = self._open.get(engine, 0) + 1
            return engine, number, lambda: self._leave(engine)

    def _leave(self, engine: CollectiveEngine) -> None:
        with self._lock:
            self._open[engine] -= 1
            if self._open[engine] == 0 and self._ours is engine:
                self.end()


ENGINE = EngineLifecycle()


def met_through(store: KVStore, config: ClusterConfig) -> World:
    """Who this worker of a job with servers is, and where rank 0 listens now."""
    hosts = _hosts(store)
    world = placed(World(store.rank, store.num_workers, launcher="the cluster"), hosts)
    is_one_machine = world.local_size == store.num_workers
    host = LOOPBACK
    if not is_one_machine and not is_loopback(config.root_host):
        host = config.node_host or local_address_towards(config.root_host, config.root_port)
    meeting, said = Meeting(), np.zeros(ADDRESS_BYTES, np.uint8)
    if store.rank == 0:
        meeting = _listening(host, config)
        text = f"{meeting.host} {meeting.port}".encode()
        said[: len(text)] = np.frombuffer(text, np.uint8)
    (said,) = store.from_rank_0([said])
    if store.rank:
        name, port = said.tobytes().rstrip(b"\0").decode().split()
        meeting = Meeting(name, int(port), job=config.job)
    return replace(world, meeting=meeting)


def _hosts(store: KVStore) -> list[int]:
    """Of each worker a number of its machine."""
    places = np.zeros(store.num_workers, np.int64)
    store.init("machines", places)
    places[store.rank] = int(this_machine(), 16)
    store.pushpull("machines", places)
    return [int(one) for one in places]


def _listening(host: str, config: ClusterConfig) -> Meeting:
    """Where this rank 0 listens from now on.

    Raises:
        ConfigError: no port is free.
    """
    first, last = config.port_range or (0, 0)
    for port in range(first, last + 1):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family)
            return Meeting(host, listening.getsockname()[1], listening.detach(), job=config.job)
    raise ConfigError(f"rank 0 cannot listen at {host}: no port is free ({first}-{last}); see KVDIST_PORT_RANGE")
