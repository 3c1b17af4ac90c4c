"""Optimizers as names and numbers: what is accepted, what is refused and in which words, and the trip over a wire."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvdist.lr_scheduler import CosineScheduler
from kvdist.optimizer import NAG, SGD, Adam, AdamW, Optimizer, Test, create, from_description, register
from kvdist.optimizer.registry import registered
from kvdist.optimizer.torch_rules import TORCH_RULES
from tests.cases import each
from tests.optimizer.formulas import TABLE

DEFAULTS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.0},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "sgld": {"learning_rate": 0.1, "seed": 0},
    "signum": {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.0},
    "dcasgd": {"learning_rate": 0.1, "momentum": 0.0, "lamda": 0.04},
    "adagrad": {"learning_rate": 0.01, "epsilon": 1e-6},
    "adadelta": {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6},
    "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adamw": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "correct_bias": True},
    "adabelief": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "correct_bias": True},
    "adamax": {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "nadam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "schedule_decay": 0.004},
    "rmsprop": {
        "learning_rate": 0.001, "rho": 0.9, "momentum": 0.9, "epsilon": 1e-8, "centered": False, "clip_weights": None,
    },
    "ftrl": {"learning_rate": 0.1, "lamda1": 0.01, "beta": 1.0},
    "ftml": {"learning_rate": 0.0025, "beta1": 0.6, "beta2": 0.999, "epsilon": 1e-8},
    "lars": {"learning_rate": 0.1, "momentum": 0.0, "eta": 0.001, "epsilon": 1e-8},
    "lamb": {
        "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "lower_bound": None,
        "upper_bound": None, "bias_correction": True,
    },
    "lans": {
        "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "lower_bound": None,
        "upper_bound": None,
    },
    "groupadagrad": {"learning_rate": 0.01, "epsilon": 1e-6},
    "test": {"learning_rate": 0.01},
}  # fmt: skip
"""Of the mirrored system's main branch; a seed is our own."""
NAMES = list(DEFAULTS)


@each("spelling, cls", [("SGD", SGD), ("nag", NAG), ("Adam", Adam), ("AdamW", AdamW), ("TEST", Test)])
def test_a_name_is_found_in_any_case(spelling, cls):
    assert type(create(spelling)) is cls


def test_an_instance_is_returned_as_it_is_and_takes_no_numbers():
    optimizer = SGD(momentum=0.9)
    assert create(optimizer) is optimizer
    with pytest.raises(TypeError, match=r"takes no further hyper-parameters \(wd\)"):
        create(optimizer, wd=0.1)
    with pytest.raises(TypeError, match="an optimizer is a name, .* or an Optimizer of kvdist, not int"):
        create(3)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown optimizer 'adma': known are .*adam, adamax, adamw,.*sgd.*test"):
        create("adma")
    with pytest.raises(ValueError, match=r"torch\.sgd; a rule of your own needs @register, and its module imported$"):
        create("zzzzzz")


def test_unknown_names_that_are_like_known_ones_are_refused_with_those():
    with pytest.raises(ValueError, match=r"unknown optimizer 'nadma'.*; did you mean nadam\?$"):
        create("nadma")
    with pytest.raises(TypeError, match=r"no hyper-parameter lerning_rate; it takes .*; did you mean learning_rate\?$"):
        create("sgd", lerning_rate=0.1)


@each(
    "name, numbers, words",
    [
        ("sgd", {"beta1": 0.9}, "sgd has no hyper-parameter beta1; it takes learning_rate, wd, .*momentum"),
        ("adam", {"lr": 0.1}, "no hyper-parameter lr .*called learning_rate"),
        ("adam", {"weight_decay": 0.1}, "called wd"),
        ("adam", {"betas": (0.9, 0.99)}, "called beta1 and beta2"),
        ("adam", {"eps": 1e-3}, "called epsilon"),
        ("rmsprop", {"alpha": 0.9}, "called rho"),
        ("rmsprop", {"gamma1": 0.9}, "called rho"),
        ("nadam", {"momentum_decay": 0.9}, "called schedule_decay"),
        ("lars", {"trust_coefficient": 0.9}, "called eta"),
        ("ftrl", {"lambda1": 0.9}, "called lamda1"),
        ("sgd", {"scheduler": None}, "called lr_scheduler"),
        ("sgld", {"seed": 1.0}, "seed must be a whole number, not 1.0 of type float"),
        ("sgd", {"multi_precision": 1}, "multi_precision must be True or False"),
        ("sgd", {"momentum": "0.9"}, "momentum must be a number, not '0.9' of type str"),
        ("sgd", {"learning_rate": True}, "learning_rate must be a number"),
        ("sgd", {"learning_rate": None}, "learning_rate must be a number"),
        ("adamw", {"correct_bias": 1}, "correct_bias must be True or False"),
    ],
)
def test_an_unknown_or_mistyped_hyper_parameter_is_named(name, numbers, words):
    with pytest.raises(TypeError, match=words):
        create(name, **numbers)


@each(
    "name, numbers, words",
    [
        ("sgd", {"momentum": 1.0}, "momentum must be below 1, not 1"),
        ("sgd", {"momentum": -0.1}, "momentum must be at least 0"),
        ("adam", {"beta2": 1.5}, "beta2 must be below 1"),
        ("adam", {"epsilon": -1e-8}, "epsilon must be at least 0"),
        ("sgd", {"learning_rate": -1}, "learning_rate must be at least 0"),
        ("sgd", {"learning_rate": float("nan")}, "learning_rate must be finite"),
        ("sgd", {"rescale_grad": float("inf")}, "rescale_grad must be finite"),
        ("sgd", {"clip_gradient": -1.0}, "clip_gradient must be at least 0"),
        ("sgd", {"wd": 10**400}, "wd is too large"),
        ("sgld", {"seed": -1}, "seed must be at least 0"),
        ("sgld", {"seed": 1 << 53}, "seed must be at most 9.0072e"),
    ],
)
def test_a_number_out_of_range_is_named(name, numbers, words):
    with pytest.raises(ValueError, match=words):
        create(name, **numbers)


@each("name", NAMES)
def test_defaults_are_those_of_the_mirrored_system(name):
    common = {
        "wd": 0.0,
        "rescale_grad": 1.0,
        "clip_gradient": None,
        "multi_precision": False,
        "lazy_update": name == "ftrl",
        "lr_scheduler": None,
    }
    assert create(name).describe() == {"name": name, **common, **DEFAULTS[name]}


def test_no_optimizer_is_left_out():
    ours = [name for name in registered() if type(create(name)).__module__.startswith("kvdist.")]
    assert ours == sorted([*DEFAULTS, *(rule.name for rule in TORCH_RULES)])


def test_every_optimizer_has_a_published_formula_and_is_in_the_reference():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "rules.md").read_text()
    assert {name for name, _, _ in TABLE} == set(DEFAULTS)
    assert [name for name in DEFAULTS if f"| `{name}` | " not in page] == []


def test_an_optimizer_prints_what_of_its_rule_is_not_the_default():
    assert str(create("rmsprop", learning_rate=3, centered=True, rho=0.5)) == "rmsprop(rho=0.5, centered=True)"
    schedule = CosineScheduler(9)
    assert str(create("sgd", lr_scheduler=schedule)) == f"sgd(lr_scheduler={schedule})"


def test_numbers_of_numpy_become_floats_and_zero_clipping_is_none():
    optimizer = create("sgd", learning_rate=np.float32(0.5), momentum=0, clip_gradient=0)
    description = optimizer.describe()
    assert type(description["learning_rate"]) is float
    assert type(description["momentum"]) is float
    assert description["clip_gradient"] is None


def test_a_frozen_hyper_parameter_cannot_change_and_the_error_says_what_can():
    optimizer = create("sgd", momentum=0.9)
    with pytest.raises(AttributeError, match=r"momentum cannot .*servers would never.*learning_rate"):
        optimizer.momentum = 0.5
    with pytest.raises(AttributeError, match="clip_gradient cannot change"):
        optimizer.clip_gradient = 1.0
    assert optimizer.momentum == 0.9


def test_a_misspelt_attribute_is_an_error_and_not_a_silent_nothing():
    with pytest.raises(AttributeError, match="no hyper-parameter lr; here it is called learning_rate"):
        create("sgd").lr = 0.1
    with pytest.raises(AttributeError, match="no hyper-parameter momentun; it has learning_rate"):
        create("sgd").momentun = 0.1


def test_what_travels_with_every_push_may_change_and_is_checked():
    optimizer = create("sgd")
    optimizer.learning_rate = 1
    optimizer.wd = 0.5
    optimizer.rescale_grad = 0.25
    assert (optimizer.learning_rate, optimizer.wd, optimizer.rescale_grad) == (1.0, 0.5, 0.25)
    with pytest.raises(ValueError, match="learning_rate must be finite"):
        optimizer.learning_rate = float("nan")
    with pytest.raises(TypeError, match="wd must be a number"):
        optimizer.wd = "big"
    assert optimizer.learning_rate == 1.0


def test_multipliers_act_on_their_key_only():
    optimizer = create("sgd", learning_rate=0.5, wd=0.25)
    optimizer.set_lr_mult({"bias": 2})
    optimizer.wd_mult = {7: 0.0}
    assert (optimizer.pushed_lr("bias"), optimizer.pushed_lr("weight")) == (1.0, 0.5)
    assert (optimizer.wd_for(7), optimizer.wd_for("7")) == (0.0, 0.25)
    with pytest.raises(TypeError, match=r"lr_mult\['bias'\] must be a number"):
        optimizer.set_lr_mult({"bias": "2"})
    with pytest.raises(TypeError, match="wd_mult must be a dict"):
        optimizer.wd_mult = 3
    assert optimizer.pushed_lr("bias") == 1.0


@each("name", NAMES)
def test_a_description_makes_an_equal_optimizer(name):
    optimizer = create(name, learning_rate=0.5, wd=0.1, rescale_grad=0.125, clip_gradient=3)
    description = optimizer.describe()
    assert all(type(value) in (str, float, int, bool, type(None)) for value in description.values())
    other = from_description(description)
    assert type(other) is type(optimizer)
    assert other.describe() == description


GOOD = create("adamw").describe()


@each(
    "description, words",
    [
        (None, "a table, not NoneType"),
        ([], "a table, not list"),
        ({}, "unknown optimizer None"),
        ({**GOOD, "name": "AdamW"}, "unknown optimizer 'AdamW'"),
        ({**GOOD, "name": ["adamw"]}, "unknown optimizer"),
        ({**GOOD, "name": "x" * 10000}, "^.{0,600}$"),
        ({**GOOD, "beta3": 1.0}, "a description of adamw has exactly name, learning_rate"),
        ({key: value for key, value in GOOD.items() if key != "beta1"}, "has exactly"),
        ({**{k: v for k, v in GOOD.items() if k != "wd"}, b"wd": 0.0}, "has exactly"),
        ({**GOOD, "beta1": "0.9"}, "beta1 .* cannot be of type str"),
        ({**GOOD, "beta1": True}, "beta1 must be a number"),
        ({**GOOD, "beta1": np.float64(0.9)}, "cannot be of type float64"),
        ({**GOOD, "beta1": None}, "beta1 must be a number"),
        ({**GOOD, "beta1": 1.0}, "beta1 must be below 1"),
        ({**GOOD, "wd": float("nan")}, "wd must be finite"),
        ({**GOOD, "wd": 10**400}, "wd is too large"),
        ({**GOOD, "correct_bias": 1}, "correct_bias must be True or False"),
        ({**GOOD, "clip_gradient": -1.0}, "clip_gradient must be at least 0"),
    ],
)
def test_a_description_that_no_optimizer_wrote_is_a_value_error(description, words):
    with pytest.raises(ValueError, match=words):
        from_description(description)


def test_a_registered_class_is_created_by_name_and_by_description():
    @register
    @dataclass(kw_only=True, eq=False)
    class SignDescent(Optimizer):
        name: ClassVar[str] = "sign_descent_of_test"

        @property
        def state_names(self):
            return ()

        def apply(self, weight, grad, out, state, scratch, step):
            np.subtract(weight, step.lr * np.sign(grad), out=out)

    optimizer = create("Sign_Descent_Of_Test", learning_rate=0.5)
    assert type(from_description(optimizer.describe())) is SignDescent


def test_a_class_that_cannot_be_an_optimizer_is_not_registered():
    with pytest.raises(TypeError, match="not a class derived from"):
        register(int)

    class Bare(SGD):
        pass

    with pytest.raises(TypeError, match="must be decorated with @dataclass"):
        register(Bare)

    @dataclass(kw_only=True, eq=False)
    class NoRule(Optimizer):
        name: ClassVar[str] = "norule"

    with pytest.raises(TypeError, match="NoRule has no rule"):
        register(NoRule)

    @dataclass(kw_only=True, eq=False)
    class NoSchema(SGD):
        name: ClassVar[str] = "noschema"
        extra: float = 1.0

    with pytest.raises(TypeError, match=r"NoSchema\.extra has no schema"):
        register(NoSchema)

    @dataclass(kw_only=True, eq=False)
    class Taken(SGD):
        name: ClassVar[str] = "sgd"

    with pytest.raises(ValueError, match="'sgd' belongs to"):
        register(Taken)
    assert type(create("sgd")) is SGD


def test_optimizers_import_neither_torch_nor_numba_nor_cupy():
    code = "import sys, kvdist.optimizer; print(sorted({'torch', 'numba', 'cupy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150)
    assert result.stdout.strip() == "[]"
