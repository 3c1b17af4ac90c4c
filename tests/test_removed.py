"""Averages of weights on servers, which were removed: errors name the replacement, and checkpoints with them load."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import kvdist.optimizer
from kvdist import Trainer, kv
from kvdist.__main__ import main
from kvdist.optimizer import create, from_description
from tests.cases import each

INSTEAD = r"was removed: use torch\.optim\.swa_utils\.AveragedModel on a worker"
KEPT = Path(__file__).parent / "checkpoint" / "kept" / "dense"
"""A checkpoint of kvdist 0.2.0 with averages of the weights."""


def trainer(optimizer="sgd", numbers=None, **more):
    return Trainer([torch.nn.Parameter(torch.ones(3))], optimizer, numbers, kvstore=None, **more)


def losses(caplog):
    """Log lines that say that averages are dropped."""
    return [
        text for text in caplog.messages if text.startswith("the averages of the weights in ") and "dropped" in text
    ]


def pull_averages():
    with kv.create("local") as store:
        store.init("w", np.ones(3, np.float32))
        store.pull("w", average=True)


@each(
    "call",
    [
        lambda: kvdist.optimizer.SGD(average_half_life=3),
        lambda: kvdist.optimizer.Adam(learning_rate=0.1, average_half_life=None),
        lambda: create("torch.adamw", average_half_life=3),
        lambda: kv.create("local").set_optimizer("sgd", average_half_life=3),
        lambda: trainer(average_half_life=3),
        lambda: trainer(numbers={"average_half_life": 3}),
        pull_averages,
    ],
)
def test_a_removed_keyword_names_what_to_use(call):
    with pytest.raises(TypeError, match=f"^average(_half_life)? {INSTEAD}$"):
        call()


def test_a_removed_attribute_names_what_to_use():
    with pytest.raises(AttributeError, match=f"^average_half_life {INSTEAD}$"):
        create("sgd").average_half_life = 3
    for name, instead in (("average_half_life", "torch.optim.swa_utils.AveragedModel"), ("kept_names", "state_names")):
        with pytest.raises(AttributeError, match=f"^{name} was removed: use {instead}"):
            getattr(create("sgd"), name)
    with pytest.raises(
        AttributeError, match="has no attribute 'averaged_weights'; it was removed: use torch.optim.swa_"
    ):
        trainer().averaged_weights  # noqa: B018


def test_a_removed_option_names_what_to_use(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", "--average", "run", "out"])
    assert ended.value.code == 2
    assert (
        "unknown option --average; it was removed: use torch.optim.swa_utils.AveragedModel" in capsys.readouterr().err
    )


def test_a_description_of_a_peer_has_no_half_life():
    with pytest.raises(ValueError, match="a description of sgd has exactly name, "):
        from_description(create("sgd").describe() | {"average_half_life": 3.0})


@each("name", [None, "adam"])
@each("kind", ["dist", "local"])
def test_a_checkpoint_with_averages_loads_its_weights_and_states_and_says_what_is_dropped(tmp_path, caplog, kind, name):
    shutil.copytree(KEPT, tmp_path / "run")
    caplog.clear()  # of the case before
    with np.load(KEPT.parent / "values.npz") as values, kv.create(kind) as store:
        if name is not None:
            store.set_optimizer(name, learning_rate=0.25, multi_precision=True)
        store.init(["large", "half"], [np.zeros(1100, np.float32), np.zeros(7, np.float16)])
        store.load_checkpoint(tmp_path / "run", states=name is not None)
        for key in ("large", "half"):
            assert store.pull(key).tobytes() == values[f"saved {key}"].tobytes()
        assert len(losses(caplog)) == (name is not None)
        if name is None:
            return
        states = store.optimizer_states(["large", "half"])
        assert [(state.count, len(state.arrays), state.master is None) for state in states] == [
            (5, 2, True), (5, 2, False)
        ]  # fmt: skip


def test_states_alone_say_so_too(tmp_path, caplog):
    shutil.copytree(KEPT, tmp_path / "run")
    with kv.create("local") as store:
        store.init(["large", "half"], [np.zeros(1100, np.float32), np.zeros(7, np.float16)])
        store.load_optimizer_states(tmp_path / "run" / "step-5")
        assert [state.count for state in store.optimizer_states(["large", "half"])] == [5, 5]
    assert len(losses(caplog)) == 1


def test_a_state_of_torch_with_averages_loads_and_says_so(caplog):
    def stepped():
        one = trainer("torch.adamw", {"lr": 0.1})
        one._model.parameters[0].replicas[0].sum().backward()
        one.step()
        return one.as_torch_optimizer()

    state, other = stepped().state_dict(), stepped()
    expected = {name: value.clone() for name, value in state["state"][0].items()}
    state["state"][0]["average"] = torch.ones(3)
    other.load_state_dict(state)
    found = other.state_dict()["state"][0]
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert len(losses(caplog)) == 1
