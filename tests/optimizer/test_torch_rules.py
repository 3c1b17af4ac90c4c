"""The rules of torch against torch itself: equations, names, defaults; and groups of keys with numbers of their own."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels import cpu
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create, from_description
from kvdist.optimizer.torch_rules import TORCH_RULES, grouped
from tests.cases import each

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rules.md"
STEPS, SIZE = 100, 300
SETTINGS = [
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"betas": (0.4, 0.9), "eps": 1e-3, "maximize": True}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "lr": 0.01, "weight_decay": 0.3}),
    ("Adamax", {}),
    ("Adamax", {"weight_decay": 0.1, "betas": (0.5, 0.7), "maximize": True}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("NAdam", {"weight_decay": 0.1, "momentum_decay": 0.1}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1, "maximize": True}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.99)}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("Adadelta", {}),
    ("Adadelta", {"rho": 0.5, "weight_decay": 0.1, "maximize": True}),
]


def section(heading):
    """The text below a heading of the page of rules, up to the next of its level."""
    (text,) = PAGE.read_text("utf-8").split(f"\n## {heading}\n")[1:]
    return text.split("\n## ")[0]


def rule(name, **numbers):
    return create(f"torch.{name}", **numbers)


@each("kernels", [REFERENCE, cpu.choose("numba")])
@each("name, numbers", SETTINGS)
def test_a_hundred_steps_agree_with_torch(name, numbers, kernels):
    """Within 1e-6 of a weight's size, or of 1 for smaller ones: a few roundings of float32."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(SIZE).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(weight))
    other, updater = getattr(torch.optim, name)([theirs], **numbers), Updater(rule(name, **numbers), kernels)
    for _ in range(STEPS):
        grad = rng.standard_normal(SIZE).astype(np.float32)
        theirs.grad = torch.tensor(grad)
        other.step()
        updater.update("w", weight, [grad], [1.0], DType.FLOAT32, weight)
    np.testing.assert_allclose(weight, theirs.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_the_product_of_nadam_is_float32_also_where_torch_keeps_it_in_float64():
    ours, found = (1.0,), {}
    for count in range(1, 21):
        ours = rule("nadam").advance(ours, count)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            theirs = torch.nn.Parameter(torch.ones(1))
            other = torch.optim.NAdam([theirs])
            for _ in range(20):
                theirs.grad = torch.ones(1)
                other.step()
        finally:
            torch.set_default_dtype(torch.float32)
        found[dtype] = float(other.state[theirs]["mu_product"])
    assert found[torch.float32] == ours[0] != found[torch.float64]


def test_the_page_lists_the_rules():
    row = section("Torch's rules").split(" have ")[0]
    assert re.findall(r"`(.*?)`", row) == [cls.name for cls in TORCH_RULES]


@each("cls", TORCH_RULES)
def test_names_and_defaults_are_those_of_torch(cls):
    theirs = inspect.signature(getattr(torch.optim, cls.__name__.removeprefix("Torch"))).parameters
    words = create(cls.name).words()
    numbers = {name: one.default for name, one in theirs.items() if name not in ("params", "foreach", "fused")}
    for without_effect in ("capturable", "differentiable"):
        numbers.pop(without_effect, None)
    assert words == numbers
    assert create(cls.name, **numbers, foreach=True).describe() == create(cls.name).describe()


def test_numbers_that_torch_refuses_are_refused_and_so_is_what_a_store_cannot_do():
    for numbers, words in [
        ({"nesterov": True}, "nesterov=True needs a momentum above 0 and no dampening"),
        ({"lr": -1.0}, "learning_rate must be at least 0"),
        ({"differentiable": True}, "gradients do not flow through a store"),
        ({"lazy_update": True, "dampening": 0.1}, "dampening needs lazy_update=False"),
    ]:
        with pytest.raises(ValueError, match=words):
            rule("sgd", **numbers)
    with pytest.raises(TypeError, match="betas must be two numbers"):
        rule("adam", betas=0.9)
    with pytest.raises(TypeError, match="no hyper-parameter alpha"):
        rule("adam", alpha=0.9)


def test_groups_travel_in_the_description_and_each_key_follows_its_own():
    """Keys 0 to 2 have their own betas, key 3 the defaults."""
    words = rule("nadam").words()
    groups = [([0, 1, 2], {**words, "betas": (0.5, 0.6), "momentum_decay": 0.2}), ([3], words)]
    fields = grouped(type(rule("nadam")), groups)
    sent = from_description(type(rule("nadam"))(**fields).describe())
    assert not sent.is_elementwise
    updater, rng = Updater(sent), np.random.default_rng(1)
    start = rng.standard_normal((4, SIZE)).astype(np.float32)
    ours, theirs = start.copy(), [torch.nn.Parameter(torch.tensor(row)) for row in start]
    others = [torch.optim.NAdam(theirs[:3], betas=(0.5, 0.6), momentum_decay=0.2), torch.optim.NAdam(theirs[3:])]
    for _ in range(STEPS):
        grads = rng.standard_normal((4, SIZE)).astype(np.float32)
        for key in range(4):
            theirs[key].grad = torch.tensor(grads[key])
            updater.update(key, ours[key], [grads[key]], [1.0], DType.FLOAT32, ours[key])
        for other in others:
            other.step()
    np.testing.assert_allclose(ours, torch.stack(theirs).detach().numpy(), rtol=1e-6, atol=1e-6)


@each(
    "groups, words",
    [
        ("{}", "groups must be a list"),
        ("[" * 1000, "groups must be a list"),
        ('[["0-",{}]]', "keys of a group are listed as in"),
        ('[["0",{"learning_rate":1}]]', "groups of torch.adam differ in"),
        ('[["0",{"beta1":2}]]', "beta1 must be below 1"),
        ("x" * 1025, "at most 1024 bytes"),
    ],
)
def test_groups_that_no_trainer_wrote_are_a_value_error(groups, words):
    with pytest.raises(ValueError, match=words):
        from_description({**rule("adam").describe(), "groups": groups})


def test_a_server_has_the_rules_without_torch():
    program = "import kvdist.optimizer as o, sys; o.create('torch.adamw', lr=0.1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


ROWS = [
    ("sgd", {"momentum": 0.9}, "SGD", {"momentum": 0.9}, {}),
    ("nag", {}, "SGD", {"momentum": 0.9, "nesterov": True}, {}),
    ("adam", {"epsilon": 0.0}, "Adam", {"eps": 0.0}, {"epsilon": 0.1}),
    ("adamw", {"epsilon": 0.0}, "AdamW", {"eps": 0.0, "weight_decay": 0.0}, {"wd": 0.1}),
    ("adamax", {"epsilon": 0.0}, "Adamax", {"eps": 0.0}, {"epsilon": 0.1}),
    ("nadam", {"schedule_decay": 0.01}, "NAdam", {"momentum_decay": 0.01}, None),
    ("adagrad", {"epsilon": 1e-6}, "Adagrad", {"eps": 1e-6}, None),
    ("adadelta", {}, "Adadelta", {}, None),
    ("rmsprop", {"rho": 0.9}, "RMSprop", {"alpha": 0.9}, {"centered": True, "momentum": 0.5}),
]
"""Rows of a table of docs/reference/rules.md: where rule and torch agree; and what makes them differ, {} a new rate."""
SPELLED = {"epsilon": "eps", "wd": "weight_decay"}


@each("name, numbers, theirs, their_numbers, difference", ROWS)
def test_the_table_of_the_page_of_rules_says_where_rules_of_one_name_agree(
    name, numbers, theirs, their_numbers, difference
):
    assert f"\n| `{name}` | `{theirs}" in section("The same name, another rule")
    assert distance(name, numbers, theirs, their_numbers) < 1e-6
    if difference is not None:
        other = {SPELLED.get(word, word): value for word, value in difference.items()}
        changed = ({**numbers, **difference}, theirs, {**their_numbers, **other})
        assert distance(name, *changed, rates=(0.1, 0.1) if difference else (0.1, 0.01)) > 1e-4


TORCHS = {"rmsprop": {"rho": "alpha"}, "nadam": {"schedule_decay": "momentum_decay"}}


@each("name, theirs", [(name, theirs) for name, _, theirs, _, _ in ROWS if name != "nag"])
def test_the_table_of_the_page_of_rules_names_every_number_with_another_default(name, theirs):
    """Also what only one side has; but for kvdist's own settings, and the momentum that only some settings use."""
    lines = section("The same name, another rule").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{name}`")]
    said, spelled = set(re.findall(r"[\w.-]+", row)), {**SPELLED, **TORCHS.get(name, {}), "learning_rate": "lr"}
    ours = create(name)
    words = {spelled.get(word, word): value for word, value in ours.describe().items()}
    words["betas"] = (words.pop("beta1", 0), words.pop("beta2", 0))
    for word, default in create(f"torch.{theirs.lower()}").words().items():
        if word in ("maximize", "dampening", "nesterov", "amsgrad", "decoupled_weight_decay", "momentum"):
            continue
        if word not in words:
            assert word in said, word
        elif word != "betas" or any(words[word]):
            assert words[word] == default or f"{words[word]:g}".replace("1e-0", "1e-") in said, word
            assert words[word] == default or f"{default:g}".replace("1e-0", "1e-") in said or word == "eps", word


def test_numbers_that_have_another_name_here_are_refused_with_it():
    for word, ours in (("lr", "learning_rate"), ("momentum_decay", "schedule_decay"), ("betas", "beta1 and beta2")):
        with pytest.raises(TypeError, match=f"{word} .here it is called {ours}"):
            create("nadam", **{word: 0.5})


def distance(name, numbers, theirs, their_numbers, rates=(0.1, 0.1)):
    """How far apart 20 steps of both end, in float64; the rate changes after 10."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal(SIZE)
    tensor, updater = torch.nn.Parameter(torch.tensor(weight)), Updater(create(name, **numbers))
    other = getattr(torch.optim, theirs)([tensor], lr=rates[0], **their_numbers)
    for step in range(20):
        rate = other.param_groups[0]["lr"] = rates[step // 10]
        grad = rng.standard_normal(SIZE)
        tensor.grad = torch.tensor(grad)
        other.step()
        updater.update("w", weight, [grad], [1.0], DType.FLOAT64, weight, lr=rate)
    return np.abs(weight - tensor.detach().numpy()).max()
