"""What users can set of a job without servers, out of a mapping of variables. Pure: `settings` has the mapping.

Horovod's variables are honoured; ours win over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvdist.config.limits import Limits, checked_limits
from kvdist.config.variables import check_security, port_range, refuse_replaced, security_settings
from kvdist.errors import ConfigError

START_TIMEOUT_S = 30.0
STALL_CHECK_S = 10.0


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """What a rank goes by.

    Attributes:
        start_timeout_s: how long the ranks may take to find each other.
        stall_check_s: an operation waited for longer than this is told of; 0 for never.
        stall_shutdown_s: one waited for longer than this ends the job; 0 for never.
        timeline: where the timeline of rank 0 is written from the start; '' for nowhere.
        timeline_marks_cycles: whether it shows where the thread of operations began to work.
        security: ``none`` or ``curve``; several ranks refuse ``curve``, as nothing encrypts their values.
        secret_file: where the secret of the job lies, which several ranks refuse likewise.
        port_range: the first and the last port at which rank 0 may listen where it chooses.
        interface: the interface, or the network, by which the ranks are to talk; '' for that which leads to rank 0.
        node_host: the address of this machine towards the others; '' for that of the interface.
        patience_s: how long a machine may not answer before it is lost.
    """

    start_timeout_s: float = START_TIMEOUT_S
    stall_check_s: float = STALL_CHECK_S
    stall_shutdown_s: float = 0.0
    timeline: str = ""
    timeline_marks_cycles: bool = False
    security: str | None = None
    secret_file: str | None = None
    port_range: tuple[int, int] | None = None
    interface: str = ""
    node_host: str = ""
    patience_s: float = Limits.patience_s


def settings_of(env: Mapping[str, str]) -> CollectiveSettings:
    """The settings that variables make.

    Raises:
        ConfigError: one has a value that means nothing.
    """
    refuse_replaced(env)
    is_checked = not _flag(env, "HOROVOD_STALL_CHECK_DISABLE")
    stall_check_s = _seconds(env, "KVDIST_STALL_CHECK_S", "HOROVOD_STALL_CHECK_TIME_SECONDS", STALL_CHECK_S)
    if not is_checked and not env.get("KVDIST_STALL_CHECK_S"):
        stall_check_s = 0.0
    start_timeout_s = _seconds(env, "KVDIST_START_TIMEOUT_S", "HOROVOD_START_TIMEOUT", START_TIMEOUT_S)
    if start_timeout_s == 0:
        raise ConfigError("KVDIST_START_TIMEOUT_S is 0; the ranks need some time to find each other")
    timeline = env.get("KVDIST_TIMELINE") or env.get("HOROVOD_TIMELINE") or ""
    patience_s = _seconds(env, "KVDIST_PATIENCE_S", "KVDIST_PATIENCE_S", Limits.patience_s)
    checked_limits(Limits(patience_s=patience_s))
    security, secret_file = security_settings(env)
    check_security(security, secret_file)
    return CollectiveSettings(
        start_timeout_s,
        stall_check_s,
        _seconds(env, "KVDIST_STALL_SHUTDOWN_S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        # With this word Horovod's users ask for one that a call begins, which needs no leave here.
        "" if timeline.upper() == "DYNAMIC" else timeline,
        _flag(env, "KVDIST_TIMELINE_MARK_CYCLES") or _flag(env, "HOROVOD_TIMELINE_MARK_CYCLES"),
        security,
        secret_file,
        port_range(env.get("KVDIST_PORT_RANGE") or ""),
        env.get("KVDIST_INTERFACE") or "",
        env.get("KVDIST_NODE_HOST") or "",
        patience_s,
    )


def _seconds(env: Mapping[str, str], ours: str, theirs: str, default: float) -> float:
    name = ours if env.get(ours) else theirs
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {text!r}; it must be a number of seconds, at least 0")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    word = (env.get(name) or "0").lower()
    if word not in ("0", "1", "true", "false"):
        raise ConfigError(f"{name} is {word!r}; it must be 0 or 1")
    return word in ("1", "true")
