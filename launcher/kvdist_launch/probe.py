"""What an agent finds out about its host before anything starts there. Each answer is a plain value of JSON.

Nothing here raises: what cannot be found out, or is wrong, is part of the answer, so that one table can show all hosts.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from kvdist.config.addresses import address_of_interface
from kvdist.config.open_files import raise_open_files_limit
from kvdist.errors import ConfigError
from kvdist.version import __version__

DIAL_S = 3.0
"""How long a host may take to reach the scheduler's port."""

ENVIRON = ("CUDA_VISIBLE_DEVICES", "SSH_CONNECTION")
"""The variables of the host that a plan wants to know."""


def usable_cores() -> int:
    """How many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinities


def facts_of_this_host() -> dict[str, Any]:
    """What is true whatever the job is. Raises the limit of open files, for what is started here later."""
    return {
        "version": __version__,
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "cores": usable_cores(),
        "open_files": raise_open_files_limit(),
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        "name": socket.gethostname(),
        "home": os.path.expanduser("~"),
        "environ": {name: os.environ[name] for name in ENVIRON if name in os.environ},
    }


def answer_here(questions: dict[str, Any]) -> dict[str, Any]:
    """What this host answers.

    Args:
        questions: ``folder``: one to be written to; ``cwd``: one to be in; ``dial``: (address, port) to be reached;
            ``interface``: a network card, or a network, in which this host has an address; ``ports``: those of which
            one has to be free.
    """
    answer: dict[str, Any] = {}
    if questions.get("interface"):
        try:
            answer["address"] = address_of_interface(str(questions["interface"]))
        except ConfigError as error:
            answer["no_interface"] = str(error)
    if questions.get("folder"):
        answer["folder"] = folder(str(questions["folder"]))
    if questions.get("cwd"):
        answer["has_cwd"] = os.path.isdir(str(questions["cwd"]))
    if questions.get("ports"):
        answer["has_port"] = any(map(is_free, questions["ports"]))
    if questions.get("dial"):
        answer["unreachable"] = dial(*questions["dial"])
    return answer


def folder(path: str) -> dict[str, Any]:
    """Whether a folder can be written to, made if need be, and how much room is there.

    Args:
        path: absolute.
    """
    nearest = Path(path)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return {"free_bytes": 0, "problem": f"{nearest} is no folder"}
    problem = "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written to"
    try:
        free_bytes = shutil.disk_usage(nearest).free
    except OSError as error:
        return {"free_bytes": 0, "problem": f"{nearest}: {error.strerror}"}
    return {"free_bytes": free_bytes, "problem": problem}


def is_free(port: int) -> bool:
    """Whether nobody listens at a port, at any address of this host."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def dial(host: str, port: int) -> str:
    """Why a port cannot be reached from here; '' if it can."""
    try:
        with socket.create_connection((host, port), timeout=DIAL_S):
            return ""
    except OSError as error:
        return unreachable(host, port, error)


def unreachable(host: str, port: int, error: OSError) -> str:
    """Why a port cannot be reached from here, in words."""
    if isinstance(error, TimeoutError):
        return f"no answer from {host}:{port} within {DIAL_S:g} s: a firewall, or no route"
    reason = errno.errorcode.get(error.errno or 0, "")
    return f"{host}:{port} cannot be reached from there: {error.strerror or error} {reason}".rstrip()
