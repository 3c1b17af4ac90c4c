"""Updates on the worker: the state of a weight follows it from the host to GPUs and back."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from kvdist import Trainer
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.local_values import Updaters
from kvdist.optimizer import Updater, create
from tests.devices import NumpyDevice


def test_a_state_follows_its_key_from_place_to_place():
    gpus = [NumpyDevice(0), NumpyDevice(1)]
    place: list[NumpyDevice | None] = [None]
    rule = create("adam", learning_rate=0.1)
    updaters, straight = Updaters(rule, REFERENCE, lambda key: place[0]), Updater(rule)
    weight = np.ones(5, np.float32)
    expected = weight.copy()
    for step, home in enumerate([None, gpus[0], gpus[1], None, gpus[0]]):
        place[0] = home
        grad = np.full(5, step + 1, np.float32)
        straight.update("w", expected, [grad], [1.0], DType.FLOAT32, expected)
        if home is None:
            updaters.of("w").update("w", weight, [grad], [1.0], DType.FLOAT32, weight)
        else:
            there = home.array(weight)
            updaters.of("w").update("w", there, [home.array(grad)], [1.0], DType.FLOAT32, there)
            weight = there.get()
        assert np.array_equal(weight, expected)
        state, other = updaters.state_of("w"), straight.state_of("w")
        assert state is not None and other is not None and state.count == other.count == step + 1
        assert all(np.array_equal(own, one) for own, one in zip(state.arrays, other.arrays, strict=True))


def test_a_worker_that_updates_itself_does_so_with_compiled_kernels(monkeypatch):
    from kvdist.kernels.cpu import LOADER, Compiled

    pytest.importorskip("numba")
    monkeypatch.setenv("KVDIST_KERNELS", "numba")
    weight = torch.nn.Parameter(torch.ones(1000))
    with mock.patch.object(Compiled, "fused_update", autospec=True, side_effect=Compiled.fused_update) as update:
        trainer = Trainer([weight], "sgd", {"learning_rate": 0.5, "momentum": 0.9}, kvstore=None)
        weight.grad = torch.full((1000,), 2.0)
        trainer.step()

    assert update.call_count == 1 and "sgd_momentum_float32" in map(str, LOADER._ready)
    assert torch.equal(weight.detach(), torch.zeros(1000))
