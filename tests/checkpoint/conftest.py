"""No test here waits for a real disk: that `fsync` is called, and when, is tested; what it does is the system's."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def disk_that_is_never_waited_for(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
