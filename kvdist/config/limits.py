"""What bounds memory, messages and waits, with every default. `settings` reads them from the environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdist.errors import ConfigError

MIB = 1 << 20

PATIENCE_S_MIN, PATIENCE_S_MAX = 1.0, 1e6
"""Less would take an ordinary delay of a busy machine for a loss; more does not fit into the options of sockets."""
HEARTBEAT_S_MAX = 1.0
DIAL_S_MIN, DIAL_S_MAX = 0.5, 2.0
"""The kernel's own attempts come after 1, 3, 7 s and later, so that a network that is back would be found too late; a
slow one needs some hundred milliseconds."""
REDIAL_S_MIN, REDIAL_S_MAX = 0.1, 2.0
RECONNECT_GRACE_S = 0.4
"""How long a connection that the peer's end closed may be away. A process that ends closes its connections at once, so
this is how soon its end is noticed."""


@dataclass(frozen=True)
class Limits:
    """What bounds memory, messages and waits. Every process of a job should have the same."""

    slice_bytes: int = 4 * MIB
    """A key travels and is updated in pieces of at most this size, so that sending and summing overlap."""
    window_bytes: int = 64 * MIB
    """Bytes that may be on the way to one server without having been received."""
    priority_slice_bytes: int = 160_000
    """The same as `slice_bytes` for stores with priority slices: 40,000 elements of float32, as in MXNet's P3."""
    priority_window_bytes: int = 4 * MIB
    """Bytes that such a store's worker may have on the way to all servers of other hosts together: what is urgent waits
    behind no more than these."""
    under_way_bytes: int = 1024 * MIB
    """Bytes that a worker has pushed and that are not counted yet, beyond which a push waits. There is always room for
    two contributions to all keys."""
    shared_bytes_max: int = 1 << 40
    """The most shared memory that a process makes; what does not fit is sent."""
    frame_bytes_max: int = 64 * MIB
    """The largest frame a socket accepts."""
    connect_timeout_s: float = 30.0
    """How long a process tries to reach the scheduler."""
    form_timeout_s: float = 300.0
    """How long the cluster may take to be complete."""
    patience_s: float = 10.0
    """How long a process or its host may be silent before it counts as lost."""
    explain_after_s: float = 10.0
    """A wait longer than this prints who is awaited, for what, since when; again at each multiple."""
    stall_shutdown_s: float = 0.0
    """A call of a worker that has waited for this long raises and ends the job; 0 for never."""
    farewell_s: float = 5.0
    """How long a process that ends waits for its last messages to leave."""

    @property
    def heartbeat_s(self) -> float:
        """How often a process tells the scheduler its step, and a socket probes its peer."""
        return min(HEARTBEAT_S_MAX, self.patience_s / 8)

    @property
    def quiet_s(self) -> float:
        """A live peer's last bytes are younger than this."""
        return 2 * self.heartbeat_s

    @property
    def silence_s(self) -> float:
        """How long a connection may bring nothing before it is broken and made anew, if the peer is there."""
        return 0.75 * self.patience_s

    @property
    def dial_s(self) -> float:
        """How long one dial waits for an answer."""
        return min(max(DIAL_S_MIN, self.patience_s / 8), DIAL_S_MAX)

    @property
    def redial_s(self) -> float:
        """The longest pause between two dials; the first is `REDIAL_S_MIN`, each is twice the one before."""
        return min(max(REDIAL_S_MIN, self.patience_s / 16), REDIAL_S_MAX)

    def reconnect_grace_s(self, after_silence: bool) -> float:
        """How long a broken connection may be away before its peer counts as lost.

        Args:
            after_silence: whether it had brought nothing for a while, and either end may have broken it for that. It
                gets what is left of the patience and three eighths more: where the network is back within the
                patience, the last word came up to a heartbeat before it went, and a dial and a pause are in vain.
        """
        return RECONNECT_GRACE_S + (5 / 8 * self.patience_s if after_silence else 0.0)


def checked_limits(limits: Limits) -> Limits:
    """The same, if they fit each other.

    Raises:
        ConfigError: they do not; the message names the variables.
    """
    sizes = {"KVDIST_SLICE_BYTES": limits.slice_bytes, "KVDIST_PRIORITY_SLICE_BYTES": limits.priority_slice_bytes}
    for name, nbytes in sizes.items():
        if not 8 <= nbytes <= limits.frame_bytes_max:
            raise ConfigError(
                f"{name} is {nbytes}; a slice has at least 8 bytes (one element of the widest type)"
                f" and at most as many as a frame (KVDIST_FRAME_BYTES_MAX, {limits.frame_bytes_max})"
            )
    if not PATIENCE_S_MIN <= limits.patience_s <= PATIENCE_S_MAX:
        raise ConfigError(
            f"KVDIST_PATIENCE_S is {limits.patience_s:g}; it must be from {PATIENCE_S_MIN:g} to {PATIENCE_S_MAX:g} s"
        )
    if 0 < limits.stall_shutdown_s < 2 * limits.explain_after_s:
        # Who is awaited has to be known by then.
        return replace(limits, explain_after_s=limits.stall_shutdown_s / 2)
    return limits


def changed_limits(limits: Limits) -> list[str]:
    """The names of those that are not the default."""
    return [name for name in Limits.__annotations__ if getattr(limits, name) != getattr(Limits(), name)]
