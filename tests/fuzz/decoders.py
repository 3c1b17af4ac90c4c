"""Every decoder of bytes from a network, led by atheris to inputs that take new ways through it: ``make fuzz``.

    python -m tests.fuzz.decoders -max_total_time=60 build/fuzz tests/fuzz/corpus     # libFuzzer's options
    python -m tests.fuzz.decoders --write                                             # the corpus anew

An input is a byte that says which decoder, and what it gets; of the wire the frames, each behind its length. Whatever
the bytes are, a decoder raises `ProtocolError` with a printable sentence, or gives something that is encoded to what
decodes to the same. `tests/fuzz/corpus` has a small input for every kind of message, and `test_decoders` takes each.
"""

from __future__ import annotations

import gc
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import get_args

import numpy as np

from kvdist.errors import ProtocolError
from kvdist.protocol import collective, objects, wire
from tests.protocol import conftest as protocol

CORPUS = Path(__file__).with_name("corpus")
LENGTH = struct.Struct("<H")
FRAMES_MAX = 40


def take_frames(data: bytes) -> None:
    """Frames of a message between processes of a job with servers."""
    frames = []
    while data and len(frames) < FRAMES_MAX:
        length = LENGTH.unpack(data[:2].ljust(2, b"\0"))[0]
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    packet = wire.decode(frames)
    again = wire.decode(wire.encode(packet))
    assert not (found := protocol.difference(packet, again)), found


def take_control(data: bytes) -> None:
    """A message between ranks of a job without servers."""
    assert collective.encode(collective.decode(data)) == data


def take_object(data: bytes) -> None:
    """An object that a rank sends to all."""
    objects.decode(np.frombuffer(data, np.uint8))


DECODERS: tuple[Callable[[bytes], None], ...] = (take_frames, take_control, take_object)


def take(data: bytes) -> None:
    """One input."""
    decoder = DECODERS[data[0] % len(DECODERS)] if data else take_frames
    try:
        decoder(data[1:])
    except ProtocolError as error:
        text = str(error)
        assert 0 < len(text) < 400 and text.isprintable(), repr(text)


def corpus() -> dict[str, bytes]:
    """Name → a valid input, one for each kind of message."""
    inputs = {}
    for message in protocol.messages():
        frames = map(bytes, wire.encode(protocol.stamped(message)))
        inputs[type(message).__name__] = b"\0" + b"".join(LENGTH.pack(len(one)) + one for one in frames)
    for kind in get_args(collective.Message):
        inputs[f"control-{kind.__name__}"] = b"\1" + bytes([kind.KIND]) + bytes(40)
    tree = {"weights": [np.arange(3, dtype=np.float32), None, True, "text", 1 << 70, b"bytes", {1, 2}], "lr": 0.1}
    inputs["object"] = b"\2" + bytes(objects.encode(tree))
    return inputs


def main(arguments: Sequence[str]) -> None:
    """Write the corpus, or fuzz."""
    if arguments[1:] == ["--write"]:
        for name, data in corpus().items():
            (CORPUS / name).write_bytes(data)
        return
    import atheris

    for one in gc.get_objects():
        if isinstance(one, FunctionType) and str(one.__module__).startswith("kvdist.protocol"):
            atheris.instrument_func(one)
    atheris.Setup(list(arguments), take)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
