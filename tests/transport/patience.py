"""How long tests of transports wait, and connections that nothing breaks but their end.

A machine that runs other tests may let a process stand still for seconds. With the patience that is usual, its peers
would take it for dead; and where a test waits for a loss, a silent heartbeat would stand in for a broken connection.
"""

from __future__ import annotations

from dataclasses import replace

from kvdist.config.settings import Limits

PATIENCE_S = 60.0
"""For anything that must happen at all. Nothing that does waits so long."""
PATIENT = replace(Limits(), patience_s=10 * PATIENCE_S)
"""Whose loss is reported within `PATIENCE_S` is one whose connection is broken."""
