"""Conversations written down: who says what to whom, and when. They are read as documentation and kept true here.

In `transcripts/*.txt` a line with `>` is a command, one with `#` is prose, and the rest is what the cluster says after
the command. `UPDATE_TRANSCRIPTS=1 pytest tests/core/test_transcripts.py` writes the files anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvdist.core.machine import PeerDisconnected
from tests.cases import each
from tests.core.wired import Wired

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


class Player:
    """Carries out the commands of one transcript."""

    def __init__(self) -> None:
        self.wired = Wired(1, 1, form=False)
        self._shown = 0
        self._ended: set[str] = set()
        self._answered: set[int] = set()
        self._reads: set[int] = set()
        self._asked: dict[int, str] = {}

    def play(self, text: str) -> str:
        """The transcript as it is now."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("#") or not line:
                lines.append(line)
            elif line.startswith("> "):
                lines.append(line)
                self._do(line[2:].split())
                lines += self._news()
        return "\n".join(lines) + "\n"

    def _do(self, words: list[str]) -> None:
        verb, *rest = words
        commands: dict[str, Callable[[list[str]], None]] = {
            "start": self._start,
            "cluster": self._form,
            "declare": self._declare,
            "give": lambda words: self._ask(words, self.wired.give(int(words[0]), {words[1]: _numbers(words[2:])})),
            "push": lambda words: self._ask(words, self.wired.push(int(words[0]), {words[1]: _numbers(words[2:])})),
            "pushpull": lambda words: self._ask(
                words, self.wired.pushpull(int(words[0]), {words[1]: _numbers(words[2:])}), True
            ),
            "pull": lambda words: self._ask(words, self.wired.pull(int(words[0]), words[1]), True),
            "leave": lambda words: self._ask(words, self.wired.leave(int(words[0]))),
            "wait": lambda words: self.wired.advance(float(words[0])),
            "kill": self._kill,
        }
        commands[verb](rest)
        if verb != "kill":
            self.wired.advance(0.0)

    def _start(self, words: list[str]) -> None:
        workers, servers = map(int, words)
        self.wired = Wired(workers, servers, form=False)

    def _form(self, words: list[str]) -> None:
        """A cluster that has joined already, and said its acknowledgements. A letter for each worker tells its host."""
        workers, servers = map(int, words[:2])
        self.wired = Wired(workers, servers, hosts=[*"".join(words[2:])], local_reduce="on")
        self.wired.advance(0.1)
        self.wired.log.clear()

    def _declare(self, words: list[str]) -> None:
        shape = tuple(map(int, words[2].split("x")))
        self._ask(words, self.wired.declare(int(words[0]), {words[1]: shape}))

    def _kill(self, words: list[str]) -> None:
        (name,) = words
        self.wired.stopped[name] = None
        self._ended.add(name)
        for other in list(self.wired.processes):
            if other not in self.wired.stopped:
                self.wired.observe(other, PeerDisconnected(self.wired.member(name), "connection reset"))

    def _ask(self, words: list[str], request: int, reads: bool = False) -> None:
        self._asked[request] = f"worker-{words[0]}"
        if reads:
            self._reads.add(request)

    def _news(self) -> list[str]:
        """What was said since the last command, then what was answered and who ended."""
        wired = self.wired
        lines = [line for line in wired.log[self._shown :] if not line.endswith(": Alive()")]
        self._shown = len(wired.log)
        for request, name in self._asked.items():
            if request in self._answered:
                continue
            if request in wired.completed:
                self._answered.add(request)
                values = {key: array.tolist() for key, array in wired.results.get(request, {}).items()}
                shown = f" {values}" if request in self._reads else ""
                lines.append(f"     {name}: request {request} is done{shown}")
            elif request in wired.failed:
                self._answered.add(request)
                error = wired.failed[request]
                lines.append(f"     {name}: request {request} fails: {type(error).__name__}: {error}")
        for name, reason in wired.stopped.items():
            if name not in self._ended:
                self._ended.add(name)
                lines.append(f"     {name} ends{'' if reason is None else f': {type(reason).__name__}: {reason}'}")
        return lines


def _numbers(words: list[str]) -> list[float]:
    return [float(word) for word in words]


@each("path", FILES)
def test_the_cluster_still_talks_as_it_is_written(path: Path) -> None:
    written = path.read_text()
    played = Player().play(written)
    if os.environ.get("UPDATE_TRANSCRIPTS") == "1":
        path.write_text(played)
        return
    assert played == written


def test_there_are_transcripts() -> None:
    assert {"joining", "a_round", "a_killed_worker", "one_push_per_host"} <= {path.stem for path in FILES}
