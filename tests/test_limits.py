"""What follows from the patience."""

from __future__ import annotations

import pytest

from kvdist.config.limits import Limits


@pytest.mark.parametrize(
    ("patience_s", "heartbeat_s", "quiet_s", "silence_s", "graces_s"),
    [(1, 0.125, 0.25, 0.75, (0.4, 1.025)), (4, 0.5, 1, 3, (0.4, 2.9)), (3600, 1, 2, 2700, (0.4, 2250.4))],
)
def test_what_follows_from_the_patience(patience_s, heartbeat_s, quiet_s, silence_s, graces_s):
    limits = Limits(patience_s=patience_s)
    assert (limits.heartbeat_s, limits.quiet_s, limits.silence_s) == (heartbeat_s, quiet_s, silence_s)
    assert (limits.reconnect_grace_s(False), limits.reconnect_grace_s(True)) == pytest.approx(graces_s)


@pytest.mark.parametrize("patience_s", [1, 1.5, 2, 4, 10, 30, 60, 3600, 1e6])
def test_who_is_back_within_the_patience_has_the_time_to_dial(patience_s):
    """The last word came a heartbeat before the network went; when it is back, a dial has just begun in vain."""
    limits = Limits(patience_s=patience_s)
    back_s = limits.heartbeat_s + limits.patience_s + limits.dial_s + limits.redial_s
    assert back_s < limits.silence_s + limits.reconnect_grace_s(after_silence=True) <= 1.375 * limits.patience_s + 0.4
