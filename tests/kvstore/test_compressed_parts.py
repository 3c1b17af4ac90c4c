"""Long lists that leave in parts have the results of short ones, and fail as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist import kv
from kvdist.errors import PushRefused
from kvdist.kvstore import push_pull
from kvdist.kvstore.push_pull import parts_of

SIZES = [3, 40, 0, 17, 1, 200, 5]
KEYS = list(range(len(SIZES)))


@pytest.fixture
def parts(monkeypatch):
    """How many parts each push had; parts are of a few elements."""
    counts: list[int] = []

    def small_parts(infos):
        found = parts_of(infos, 64)
        counts.append(len(found))
        return found

    monkeypatch.setattr(push_pull, "parts_of", small_parts)
    return counts


def filled(number):
    return [np.full(size, number, np.float32) for size in SIZES]


def opened(name="dist", **more):
    store = kv.create(name)
    store.set_gradient_compression({"type": "2bit", **more})
    return store


def test_every_call_gives_what_it_gives_in_one_part(parts):
    with opened(pull="fp16") as store:
        store.set_optimizer("test")
        store.init(KEYS, filled(0))
        store.push(KEYS, filled(0.25))
        store.push_async(KEYS, filled(0.25)).result()
        assert all((value == 0.5).all() for value in store.pull(KEYS))
        outs = filled(7)
        store.pushpull(KEYS, filled(0.75), out=outs)
        assert all((value == 1).all() for value in outs)
        given = filled(0.25)
        store.pushpull_async(KEYS, [[one, one.copy()] for one in given]).result()  # two devices, in place
        assert all((value == 1.5).all() for value in given)
        store.pushpull(KEYS, [None if key == 3 else one for key, one in enumerate(filled(0.25))], out=outs)
        assert [float(value.max(initial=0)) for value in outs] == [2, 2, 0, 1.5, 2, 2, 2]
        assert set(parts) == {4}


def test_an_error_of_a_part_is_raised_when_nothing_is_under_way(parts):
    with opened("dist_async") as store:
        store.init(KEYS, filled(0))
        for call in (store.push_async, store.pushpull_async):
            with pytest.raises(PushRefused, match="needs an optimizer"):
                call(KEYS, filled(0.5)).result()
        store.set_optimizer("test")
        store.push(KEYS, filled(0.5))
        assert all((value == 0.5).all() for value in store.pull(KEYS))
    assert parts == [4, 4, 4]
