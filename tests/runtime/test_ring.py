"""What a ring keeps and when it writes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import get_args

import pytest

from kvdist.checkpoint.snapshot import Sweep
from kvdist.config.settings import ClusterConfig
from kvdist.core.machine import Effect, Event, Forget, Send, Transmit
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.diagnostics import ring as rings
from kvdist.diagnostics.ring import Ring
from kvdist.diagnostics.why import read_dumps
from kvdist.nodes import Member, Role, server


def make(folder: Path | None, events_max: int = 4) -> Ring:
    return Ring(Scheduler(ClusterConfig(Role.SCHEDULER, "127.0.0.1", 1, 1, 1), 0.0), 7, events_max, folder)


def test_it_keeps_the_last_events_and_counts_the_others(tmp_path: Path) -> None:
    ring = make(tmp_path)
    for number in range(10):
        ring.ticked(float(number))
    ring.ended(ValueError("wrong"))
    (dump,) = read_dumps(tmp_path)
    assert [entry.now for entry in dump.entries] == [6.0, 7.0, 8.0, 9.0]  # type: ignore[union-attr]
    assert dump.about["dropped"] == 6 and dump.about["reason"] == "ValueError: wrong"


def test_long_headers_push_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "HEADERS_BYTES_MAX", 100)
    ring = make(None, 1000)
    for _ in range(50):
        ring.sent(ring._machine.me, [b"envelope", b"x" * 30])
    assert len(ring.entries) == 3 and ring.dropped == 47


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    ring = make(tmp_path)
    child = os.fork()
    if child == 0:
        ring.write("ended")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not list(tmp_path.iterdir())
    ring.write("ended")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    make(tmp_path / "file" / "dumps").ended(ValueError("wrong"))
    assert "scheduler cannot write its dump to " in caplog.text


def test_every_effect_and_event_can_be_kept(tmp_path: Path) -> None:
    ring = make(tmp_path, 1000)
    member = Member(server(1), 7)
    fields = {"to": member, "stranger": member, "member": member, "node": member.node, "keys": (1,), "text": "a"}
    fields |= {"request": 3, "error": ValueError("b"), "endpoint": "c", "line": "d", "token": "e", "cause": "f"}
    fields |= {"work": Sweep("/folder"), "reason": "g", "clean": True, "host": "h", "pid": 4}
    fields |= {"computed_s": 0.25, "waited_s": 0.5}
    effects = [kind for kind in get_args(Effect) if kind not in (Send, Transmit, Forget)]
    for kind in (*effects, *get_args(Event)):
        names = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
        one = kind(**{name: fields[name] for name in names})
        ring.did(one) if kind in effects else ring.observed(1.0, one)
    ring.write("wanted")
    (dump,) = read_dumps(tmp_path)
    assert len(dump.entries) == len(effects) + len(get_args(Event)) and len(effects) > 8
