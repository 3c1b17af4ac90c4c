"""The corpus of the decoders' fuzzing: it has every kind of message, and every input is decoded as it should be."""

from __future__ import annotations

import pytest

from kvdist.errors import ProtocolError
from kvdist.protocol import wire
from tests.cases import each
from tests.fuzz.decoders import CORPUS, corpus, take, take_frames

FILES = sorted(CORPUS.iterdir())


def test_the_corpus_has_every_kind() -> None:
    kinds = {kind.message.__name__ for kind in wire.KINDS.values()}
    missing = (kinds | corpus().keys()) - {path.name for path in FILES}
    assert not missing, f"{missing}: python -m tests.fuzz.decoders --write makes them"


@each("name", [path.name for path in FILES if path.name in {kind.message.__name__ for kind in wire.KINDS.values()}])
def test_a_message_of_the_corpus_is_valid(name: str) -> None:
    take_frames((CORPUS / name).read_bytes()[1:])


@each("path", FILES)
def test_an_input_and_its_beginnings_are_refused_or_taken(path) -> None:
    data = path.read_bytes()
    for end in (*range(0, len(data), 7), len(data)):
        take(data[:end])


def test_a_decoder_that_raises_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise KeyError("field")

    monkeypatch.setattr(wire, "_check_header", wrong)
    with pytest.raises(KeyError):
        take((CORPUS / "Push").read_bytes())
    monkeypatch.setattr(wire, "_check_header", lambda *_: (_ for _ in ()).throw(ProtocolError("line\nbreak")))
    with pytest.raises(AssertionError, match="break"):
        take((CORPUS / "Push").read_bytes())
