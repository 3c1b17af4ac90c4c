"""The name that ``ps -e`` and ``top`` show for a process of a job: its role and rank."""

from __future__ import annotations

import contextlib
from pathlib import Path


def name_process(node: str) -> None:
    """Call this process ``kv-`` and `node`, where processes have such names (Linux). Its command line stays as it is.

    Args:
        node: such as ``server-12``. The system keeps 15 bytes, so a longer prefix would cut ranks.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"kv-{node}")
