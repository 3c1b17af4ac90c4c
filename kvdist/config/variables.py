"""The names of environment variables, and how values are read out of a mapping. `settings` has the mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvdist.errors import ConfigError

TWINS = {
    "KVDIST_ROLE": "DMLC_ROLE",
    "KVDIST_ROOT_URI": "DMLC_PS_ROOT_URI",
    "KVDIST_ROOT_PORT": "DMLC_PS_ROOT_PORT",
    "KVDIST_NUM_WORKER": "DMLC_NUM_WORKER",
    "KVDIST_NUM_SERVER": "DMLC_NUM_SERVER",
    "KVDIST_NODE_HOST": "DMLC_NODE_HOST",
    "KVDIST_INTERFACE": "DMLC_INTERFACE",
    "KVDIST_BIGARRAY_BOUND": "MXNET_KVSTORE_BIGARRAY_BOUND",
    "KVDIST_UPDATE_ON_KVSTORE": "MXNET_UPDATE_ON_KVSTORE",
    "KVDIST_PROFILER_AUTOSTART": "MXNET_PROFILER_AUTOSTART",
}
"""Our name of a variable → the name in the mirrored system."""

WITHOUT_EFFECT = {
    "DMLC_PS_VAN_TYPE": "but for p3; there is one transport, and KVDIST_TRANSPORT turns shared memory off",
    "DMLC_PS_WATER_MARK": "KVDIST_WINDOW_BYTES bounds what is on its way, for P3 KVDIST_PRIORITY_WINDOW_BYTES",
    "DMLC_LOCAL": "processes of one host share memory by themselves",
    "DMLC_USE_KUBERNETES": "DMLC_NODE_HOST is the address that a server announces",
    "PS_HEARTBEAT_INTERVAL": "heartbeats are always on; their interval follows from KVDIST_PATIENCE_S",
    "PS_HEARTBEAT_TIMEOUT": "KVDIST_PATIENCE_S is how long a process may be silent",
    "PS_RESEND": "what is lost is always sent again",
    "MXNET_KVSTORE_USETREE": "GPUs that reach each other are summed first where not all do; nothing is to be set",
    "MXNET_KVSTORE_REDUCTION_NTHREADS": "values of the host are summed on the thread that pushes, those of GPUs there",
    "MXNET_OPTIMIZER_AGGREGATION_SIZE": "all parameters of a step travel together",
}
"""Variables of the mirrored system that people set and that change nothing here → what there is instead."""

REPLACED_BY_PATIENCE = ("KVDIST_SILENCE_S", "KVDIST_RECONNECT_GRACE_S", "KVDIST_HEARTBEAT_S")
"""Variables of earlier versions in whose place there is ``KVDIST_PATIENCE_S``."""

SLICE_THRESHOLD = "MXNET_KVSTORE_SLICE_THRESHOLD"
"""Elements of float32; ``KVDIST_PRIORITY_SLICE_BYTES`` wins over it."""

CLUSTER_VARIABLES = ("KVDIST_ROLE", "KVDIST_ROOT_URI", "KVDIST_ROOT_PORT", "KVDIST_NUM_WORKER", "KVDIST_NUM_SERVER")
"""What a process must be told to take part in a cluster."""

FOREIGN_LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpirun (PMI)": ("PMI_SIZE", "PMI_RANK"),
    "Slurm's srun": ("SLURM_NTASKS", "SLURM_PROCID"),
}
"""Launcher → the variables with which it says how many tasks there are and which one this is."""


def with_twins(environ: Mapping[str, str]) -> dict[str, str]:
    env = dict(environ)
    for ours, theirs in TWINS.items():
        if not env.get(ours) and env.get(theirs):
            env[ours] = env[theirs]
    return env


def refuse_replaced(env: Mapping[str, str]) -> None:
    """Refuse variables of earlier versions.

    Raises:
        ConfigError: one is set.
    """
    for name in REPLACED_BY_PATIENCE:
        if env.get(name):
            raise ConfigError(
                f"{name} is {env[name]}, but this variable was replaced by KVDIST_PATIENCE_S (kvdist-launch"
                " --patience): how long a process or its host may be silent before it counts as lost, 10 s by default;"
                f" unset {name}"
            )


def both(names: list[str]) -> str:
    return ", ".join(TWINS.get(name, name) for name in names) + (" is" if len(names) == 1 else " are")


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{TWINS.get(name, name)} is {text!r}; it must be a whole number") from None


def port_range(text: str) -> tuple[int, int] | None:
    """The ends of a range like ``20000-20100``; None for an empty text.

    Raises:
        ConfigError: it is no range of ports.
    """
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise ConfigError(f"KVDIST_PORT_RANGE is {text!r}; write it like 20000-20100")
    ends = int(first), int(last)
    if not 1 <= ends[0] <= ends[1] <= 65535:
        raise ConfigError(f"KVDIST_PORT_RANGE is {text!r}; it must lie within 1-65535, the smaller port first")
    return ends


def device_names(name: str, text: str) -> tuple[str, ...]:
    """The devices in a text like ``cpu`` or ``cuda:0,cuda:1``.

    Args:
        name: of the variable or option, for the message.
        text: what it says.

    Raises:
        ConfigError: one is no device.
    """
    devices = tuple(word.strip().lower() for word in text.split(","))
    for device in devices:
        if not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", device):
            raise ConfigError(
                f"{name} is {text!r}, and {device!r} is no device: write cpu, cuda:0 for the first GPU of a server's"
                " host, or a list such as cuda:0,cuda:1 that the servers take in turn"
            )
    return devices


def one_of(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        known = ", ".join(word for word in allowed if word)
        raise ConfigError(f"{name} is {value!r}; it must be one of: {known}")


def security_settings(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """``KVDIST_SECURITY`` and ``KVDIST_SECRET_FILE``, None where they are not set; see `check_security`."""
    return (env.get("KVDIST_SECURITY") or "").lower() or None, env.get("KVDIST_SECRET_FILE") or None


def check_security(security: str | None, secret_file: str | None) -> None:
    """Refuse settings about security that contradict each other.

    Raises:
        ConfigError: `security` is another word than none and curve, or it is none and there is a secret.
    """
    one_of("KVDIST_SECURITY", security, (None, "none", "curve"))
    if security == "none" and secret_file is not None:
        raise ConfigError(
            f"KVDIST_SECURITY is none, but KVDIST_SECRET_FILE is {secret_file!r}: unset the one that is not meant"
        )


def refuse_foreign_launcher(env: Mapping[str, str]) -> None:
    for launcher, (size_name, rank_name) in FOREIGN_LAUNCHERS.items():
        size = env.get(size_name, "")
        if size.isdigit() and int(size) > 1 and rank_name in env:
            raise ConfigError(
                f"{launcher} started {size} tasks ({size_name}={size}), but no kvdist cluster is described: each task"
                " would train a model of its own. Start with kvdist-launch -n WORKERS -s SERVERS COMMAND instead, or"
                " take kv.create('collective'), which needs no servers"
            )
