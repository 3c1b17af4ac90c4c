"""Exceptions for the end of a job and for refused requests, the same wherever they are raised."""

from __future__ import annotations

from kvdist import errors
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

_REFUSALS: dict[int, type[errors.KvdistError]] = {
    msg.ErrorCode.INTERNAL: errors.KvdistError,
    msg.ErrorCode.INIT_MISMATCH: errors.InitMismatch,
    msg.ErrorCode.OPTIMIZER_MISMATCH: errors.OptimizerMismatch,
    msg.ErrorCode.REFUSED: errors.PushRefused,
    msg.ErrorCode.CONFIG: errors.ConfigError,
    msg.ErrorCode.CHECKPOINT: errors.CheckpointError,
    msg.ErrorCode.PEER_LOST: errors.PeerLostError,
    msg.ErrorCode.DEADLOCK: errors.DeadlockError,
}


def refusal(code: int, text: str) -> errors.KvdistError:
    """The exception for a refused request, by the code of the reason."""
    return _REFUSALS.get(code, errors.KvdistError)(text)


def verdict(message: msg.Abort) -> errors.KvdistError:
    """The scheduler's verdict as an exception."""
    if message.code == msg.ErrorCode.DEADLOCK:
        return errors.DeadlockError(message.sentence)
    step = None if message.step < 0 else message.step
    return errors.PeerLostError(message.sentence, message.node, message.host, message.cause, step)


def scheduler_lost(
    endpoint: str, me: Member, cause: str = "its connection closed and did not come back"
) -> errors.PeerLostError:
    """The exception for the loss of the scheduler itself, which `me` noticed."""
    return errors.PeerLostError(
        f"scheduler (at {endpoint}) was lost: {cause}; noticed by {me}", "scheduler", endpoint, cause
    )


def scheduler_away(endpoint: str, me: Member, away_s: float) -> errors.PeerLostError:
    """The exception for a scheduler that was not restarted while `me` waited."""
    if not away_s:
        return scheduler_lost(endpoint, me)
    return scheduler_lost(endpoint, me, f"it was not started again within {away_s:g} s (KVDIST_SCHEDULER_AWAY_S)")


def link_lost(member: Member, host: str, me: Member, reason: str) -> errors.PeerLostError:
    """The exception for a connection of `me` to `member` that is lost for good, without an explanation by the
    scheduler."""
    cause = f"its connection to {me} broke ({reason}) and did not come back, though the scheduler still sees it"
    return errors.PeerLostError(f"{member} (host {host}) was lost: {cause}", str(member), host, cause)


def unreachable(member: Member, host: str, me: Member, reason: str) -> errors.PeerLostError:
    """The exception for a live `member` that messages of `me` do not reach."""
    cause = f"{me} cannot reach it: {reason}"
    return errors.PeerLostError(f"{member} (host {host}) was lost: {cause}", str(member), host, cause)


def replicas_differ(me: Member, own: int, others: int) -> errors.ConfigError:
    """The exception for a process `me` whose number of replicas differs from the scheduler's."""
    return errors.ConfigError(
        f"{me} was started with KVDIST_REPLICAS={own} and the scheduler with {others}: give all processes the same"
    )
