"""Counters of the passes over values, for tests that a pass too many would fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Bytes of values that a process has touched since it started. The transport counts its copies itself.

    copied_in: a worker copied them to the buffer that they are sent from. copied_out: a worker copied them from the
    received buffer to the user's array. summed: a server, or the worker that sums for its host, read them as
    contributions. joined: a server copied them together, because they are small. passed_on: the worker that sums for
    its host copied them to memory that the others of the host read.
    """

    copied_in: int = 0
    copied_out: int = 0
    summed: int = 0
    joined: int = 0
    passed_on: int = 0
