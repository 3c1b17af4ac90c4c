"""The control channel beside the data: a ZeroMQ star around rank 0, and the thread of each rank that drives it.

Rank 0 listens at a free port and publishes its endpoint and a token in the rendezvous store; a rank sends the token
when it connects. Messages without it are dropped and change nothing. Only the control thread touches the transport;
other threads queue messages and wake it.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import secrets
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]

from kvdist.collective.consistency import CoordinatedCheck
from kvdist.collective.coordinator import Answers, Coordinator, named
from kvdist.config.addresses import host_name, this_machine
from kvdist.config.endpoints import is_loopback, tcp_endpoint
from kvdist.config.environment import World
from kvdist.config.settings import CollectiveSettings, Limits
from kvdist.config.sockets import WITHOUT_SERVERS, further_endpoint, require_private_folder
from kvdist.errors import CollectiveError, ConfigError, ProtocolError
from kvdist.nodes import worker
from kvdist.protocol.collective import (
    MESSAGE_BYTES_MAX,
    WHOLE_JOB,
    AllConnected,
    Farewell,
    GroupFailed,
    Message,
    RankGone,
    RankHello,
    ToCoordinator,
    decode,
    encode,
)
from kvdist.transport.base import Arrived, Connected, DialRefused, Disconnected, Event, Route
from kvdist.transport.factory import bind_first_free
from kvdist.version import __version__

if TYPE_CHECKING:
    from kvdist.transport.zeromq import ZeroMQTransport


def open_transport(settings: CollectiveSettings) -> ZeroMQTransport:
    """Open a ZeroMQ transport without encryption.

    A stopped rank does not count as lost; a rank whose machine is down does, because heartbeats are not acknowledged.

    Raises:
        ConfigError: the settings ask for encryption.
    """
    if settings.secret_file is not None or settings.security == "curve":
        name = "KVDIST_SECURITY=curve" if settings.secret_file is None else "KVDIST_SECRET_FILE"
        raise ConfigError(
            f"{name} asks for encryption, but collective operations (gloo, NCCL) are not encrypted: unset it if the"
            " ranks are on one machine or in a network that you trust, or use 'dist'"
        )
    from kvdist.transport.zeromq import ZeroMQTransport

    limits = Limits(frame_bytes_max=MESSAGE_BYTES_MAX, patience_s=settings.patience_s)
    return ZeroMQTransport(limits, judges_silence=False)


def listen(transport: ZeroMQTransport, address: str, settings: CollectiveSettings) -> str:
    """Listen at a free port of an address, within the port range if one is set, and return the endpoint.

    If all ranks are on one machine, listen at a file instead, unless ``KVDIST_SECURITY`` is ``none``.

    Raises:
        ConfigError: this machine does not have the address, or every port of the range is taken.
    """
    if is_loopback(address) and settings.security is None:
        require_private_folder(WITHOUT_SERVERS)
        return transport.bind(further_endpoint(0))
    if settings.port_range is None:
        return transport.bind(tcp_endpoint(address, 0))
    first, last = settings.port_range
    return bind_first_free(transport, address, range(first, last + 1))


LOG = logging.getLogger("kvdist")

TICK_S = 0.25
LOOK_AGAIN_S = 0.02
"""Interval at which a rank checks for the token of rank 0's next meeting."""
FAREWELL_S = 2.0
"""Time that a leaving rank waits for the acknowledgement of its goodbye."""
BROKEN = "its process ended, or its connection broke"
_KEY = "control"


def open_control(world: World, store: Store, address: str, settings: CollectiveSettings, met: set[str]) -> Control:
    """Open this rank's end of the channel; arguments and errors as those of `Control`."""
    return (Hub if world.rank == 0 else Spoke)(world, store, address, settings, met)


class Control(abc.ABC):
    """A rank's end of the channel, with its thread.

    Args:
        world: this process's rank, size and machine.
        store: shared by all ranks.
        address: address of this machine, at which rank 0 listens.
        settings: the user's settings.
        met: the tokens of earlier meetings; the new token is added.

    Attributes:
        check: the consistency check of this rank's groups.
        token: drawn by rank 0 for this meeting alone.
        hosts: host names of all ranks, for people; empty until all have connected.
        machines: machines of all ranks, equal for ranks on the same machine; empty until then.
        is_alone: whether the connection to rank 0 has ended.

    Raises:
        CollectiveError: rank 0 has not begun in time.
    """

    is_alone = False
    patience_s: float
    """Time to wait for the other ranks, in seconds."""

    def __init__(self, world: World, store: Store, address: str, settings: CollectiveSettings, met: set[str]) -> None:
        self.world = world
        self.settings = settings
        self._store = store
        self._met = met
        self.transport = open_transport(settings)
        self.check = CoordinatedCheck(world.rank, host_name(), self.transport.wake, self._say)
        self._has_begun = threading.Event()
        self.hosts: tuple[str, ...] = ()
        self.machines: tuple[str, ...] = ()
        self._refusal = ""
        self._heard_farewell = False
        self._deadline: float | None = None
        try:
            self.token = self.meet(store, address)
        except BaseException:
            self.transport.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvdist-control", daemon=True)
        self._thread.start()

    def wait_for_all(self) -> None:
        """Wait until all ranks have connected.

        Raises:
            CollectiveError: not all have in time, or rank 0 refuses this rank.
        """
        if not self._has_begun.wait(self.patience_s):
            self._refusal = self.missing()
        if self._refusal:
            # Only here: a thread that waits in gloo for another rank's address keeps the store to itself.
            self.withdraw()
            self.close(self._refusal)
            raise CollectiveError(self._refusal)

    def close(self, failure: str = "") -> None:
        """Leave the job; `failure` tells the other ranks why.

        Returns at once if no other rank is left. Rank 0 stays while others have process sets without it.
        """
        self._deadline = time.monotonic() + FAREWELL_S
        self.check.say_goodbye(failure)
        self._thread.join()

    @abc.abstractmethod
    def meet(self, store: Store, address: str) -> str:
        """Listen or connect; return the token."""

    @abc.abstractmethod
    def missing(self) -> str:
        """The message about the ranks that have not connected in time."""

    def withdraw(self) -> None:  # noqa: B027 (rank 0 alone can)
        """Keep further ranks away from this meeting."""

    # On the control thread.

    @abc.abstractmethod
    def handle(self, event: Event) -> None:
        """Handle an event of the transport."""

    @abc.abstractmethod
    def send(self, message: ToCoordinator, now: float) -> None:
        """Send a message to rank 0."""

    def tick(self, now: float) -> None:  # noqa: B027 (rank 0 alone has to)
        """Handle the passing of time."""

    @property
    def is_needed(self) -> bool:
        """Whether other ranks still need this end of the channel after this rank has left."""
        return False

    def hear(self, message: Message) -> None:
        """Handle a message from rank 0."""
        match message:
            case AllConnected(hosts=hosts, machines=machines):
                self.hosts, self.machines = hosts, machines
                self._has_begun.set()
            case Farewell():
                self._heard_farewell = True
            case GroupFailed(text=text) | RankGone(cause=text) if not self._has_begun.is_set():
                self.refuse(text)
            case _:
                self.check.hear(message)  # type: ignore[arg-type]  # it ignores other messages

    def refuse(self, text: str) -> None:
        """Give up this meeting."""
        self._refusal = text
        self._has_begun.set()

    def host_of(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else "?"

    def _run(self) -> None:
        try:
            rank, size = self.world.rank, self.world.size
            hello = RankHello(self.token, rank, size, host_name(), this_machine(), __version__)
            self.send(hello, time.monotonic())
            while not self._may_end():
                for event in self.transport.recv(TICK_S):
                    self.handle(event)
                now = time.monotonic()
                for message in self.check.take(now):
                    self.send(message, now)
                self.tick(now)
        except Exception as error:
            LOG.exception("the control thread of rank %d ended", self.world.rank)
            text = f"the control thread of rank {self.world.rank} ended by {type(error).__name__}: {error}"
            self.check.fail(lambda _: CollectiveError(text))
            self.refuse(text)
        finally:
            self.transport.close(FAREWELL_S)

    def _may_end(self) -> bool:
        if self.is_alone or self._deadline is None or self.is_needed:
            return self.is_alone
        return self._heard_farewell or time.monotonic() >= self._deadline

    def _say(self, sentence: str) -> None:
        LOG.warning("%s", sentence)


class Hub(Control):
    """Rank 0's end, with the coordinator."""

    def meet(self, store: Store, address: str) -> str:
        settings = self.settings
        self._coordinator = Coordinator(self.world.size, settings.stall_check_s, settings.stall_shutdown_s)
        self.patience_s = settings.start_timeout_s
        self._routes: dict[int, Route] = {}
        self._ranks: dict[Route, int] = {}
        token = secrets.token_hex(8)
        store.set(_KEY, f"{listen(self.transport, address, self.settings)} {token}")
        return token

    def missing(self) -> str:
        size, missing = self.world.size, self._coordinator.missing
        return (
            f"{size - len(missing)} of {size} ranks have come within {self.patience_s:g} s (KVDIST_START_TIMEOUT_S);"
            f" missing: {named(missing)}"
        )

    def withdraw(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and the meeting point with it
            self._store.delete_key(_KEY)

    def send(self, message: ToCoordinator, now: float) -> None:
        try:
            self._answer(self._coordinator.hear(0, message, now))
        except ProtocolError as error:
            LOG.info("rank 0 has dropped a message of its own: %s", error)

    def tick(self, now: float) -> None:
        self._answer(self._coordinator.tick(now))

    @property
    def is_needed(self) -> bool:
        return self._coordinator.is_needed

    def handle(self, event: Event) -> None:
        if isinstance(event, Disconnected) and event.route in self._ranks:
            rank = self._ranks.pop(event.route)
            del self._routes[rank]
            self._answer(self._coordinator.lose(rank, BROKEN))
        if not isinstance(event, Arrived):
            return
        try:
            for frame in event.frames:
                message = decode(frame)
                rank = self._ranks[event.route] if event.route in self._ranks else self._admit(message, event)
                self._answer(self._coordinator.hear(rank, message, time.monotonic()))  # type: ignore[arg-type]
        except ProtocolError as error:
            LOG.info("rank 0 has dropped a message: %s", error)

    def _admit(self, message: Message, event: Arrived) -> int:
        """Return the rank that sent its first message.

        Raises:
            ProtocolError: the sender has no token; or its rank does not fit this job, and it is sent the reason.
        """
        if not isinstance(message, RankHello) or not secrets.compare_digest(
            message.token.encode(), self.token.encode()
        ):
            raise ProtocolError("its sender does not have the token")
        rank, refusal = message.rank, ""
        if message.version != __version__:
            refusal = (
                f"rank {rank} on host {message.host} has kvdist {message.version}, and rank 0 has {__version__}:"
                " install the same everywhere"
            )
        elif message.size != self.world.size:
            refusal = (
                f"rank {rank} on host {message.host} belongs to a job of {message.size} ranks, and rank 0 to one of"
                f" {self.world.size}"
            )
        elif rank not in self._coordinator.missing:
            refusal = f"two processes say that they are rank {rank}, one of them on host {message.host}"
        if refusal:
            self.transport.send(event.route, [encode(GroupFailed(WHOLE_JOB, refusal))])
            raise ProtocolError(refusal)
        self._routes[rank], self._ranks[event.route] = event.route, rank
        return rank

    def _answer(self, answers: Answers) -> None:
        for rank, message in answers:
            if rank == 0:
                self.hear(message)
            elif rank in self._routes:
                self.transport.send(self._routes[rank], [encode(message)])


class Spoke(Control):
    """The end of any other rank."""

    def meet(self, store: Store, address: str) -> str:
        timeout_s = self.settings.start_timeout_s
        # Rank 0 names the missing ranks when its own time is over, which may have begun later.
        self.patience_s = timeout_s + FAREWELL_S
        self._is_connected = False
        deadline = time.monotonic() + timeout_s
        try:
            store.wait([_KEY], timedelta(seconds=timeout_s))
            endpoint, token = store.get(_KEY).decode().split()
            while token in self._met:
                # That meeting is over here, so it is or soon will be over on rank 0.
                if time.monotonic() >= deadline:
                    raise TimeoutError
                time.sleep(LOOK_AGAIN_S)
                store.wait([_KEY], timedelta(seconds=max(0.001, deadline - time.monotonic())))
                endpoint, token = store.get(_KEY).decode().split()
        except (RuntimeError, ValueError, TimeoutError) as error:
            again = " again" if self._met else ""
            raise CollectiveError(
                f"rank {self.world.rank} on {host_name()} has found the meeting point, but rank 0 has not called init()"
                f"{again} within {timeout_s:g} s (KVDIST_START_TIMEOUT_S)"
            ) from error
        self._home = self.transport.connect(endpoint, worker(0))
        self._endpoint = endpoint
        return str(token)

    def missing(self) -> str:
        return (
            f"rank {self.world.rank} on {host_name()} has heard nothing of rank 0 at {self._endpoint} within"
            f" {self.settings.start_timeout_s:g} s (KVDIST_START_TIMEOUT_S)"
        )

    def send(self, message: ToCoordinator, now: float) -> None:
        if not self.is_alone:
            self.transport.send(self._home, [encode(message)])

    def handle(self, event: Event) -> None:
        match event:
            case Arrived(frames=frames):
                for frame in frames:
                    message = decode(frame)
                    self.hear(message)
                    has_left = isinstance(message, RankGone) and message.rank == 0
                    # Rank 0 stays, if it can, to compare operations in process sets without it.
                    if has_left and (self.check.has_failed or not self.check.has_groups_without_rank_0):
                        self.is_alone = True
            case Connected():
                self._is_connected = True
                self._met.add(self.token)
            case DialRefused(reason=reason):
                self.refuse(f"rank 0 refuses rank {self.world.rank} on {host_name()}: {reason}")
            case Disconnected() if self._is_connected and not self.is_alone:
                self.is_alone = True
                if self._has_begun.is_set():
                    self.check.lose(0, self.host_of(0), BROKEN)
                else:
                    self.refuse(f"rank 0 is gone before all ranks had come: {BROKEN}")
