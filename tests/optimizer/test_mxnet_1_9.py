"""Defaults and equations that changed after MXNet 1.9: each line of the two tables in docs/reference/mxnet.md."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from kvdist import LazyRows, RowSparse, Trainer, kv, lr_scheduler
from kvdist.optimizer import Updater, create
from kvdist.optimizer.mxnet_1_9 import DEFAULTS, NAME
from tests.cases import each

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "mxnet.md"
WEIGHT = [0.5, -1.0, 2.0, -0.25]
GRADS = [[0.1, -0.2, 0.3, 0.05], [-0.4, 0.1, 0.2, -0.3], [0.25, 0.15, -0.35, 0.6]]
TOLERANCE = 2.5e-6
"""Of float32 in another order of operations; for `groupadagrad` the place of ε is in it, which is 1e-5."""

EQUAL = [
    ("sgd", {}, [0.500500023, -1.00049996, 1.99849999, -0.253499985]),
    ("sgd", {"momentum": 0.9, "wd": 0.1}, [0.499587178, -0.992381394, 1.98037302, -0.25025481]),
    ("nag", {}, [0.500500023, -1.00049996, 1.99849999, -0.253499985]),
    ("nag", {"momentum": 0.9}, [0.502651036, -0.998682082, 1.99091303, -0.254989535]),
    ("dcasgd", {}, [0.500499964, -1.00049996, 1.99850011, -0.253500402]),
    ("signum", {"wd": 0.1}, [0.49000001, -0.970000029, 1.97000003, -0.25999999]),
    ("ftml", {}, [0.493991792, -0.998877048, 1.99125135, -0.259162605]),
    ("ftml", {"wd": 0.1}, [0.492668539, -0.991511166, 1.98652434, -0.258867919]),
    ("adagrad", {}, [0.494516701, -1.00004303, 1.99141824, -0.259055406]),
    ("groupadagrad", {}, [0.499335021, -0.994209409, 1.98595083, -0.253436387]),
    ("adadelta", {}, [0.493290246, -1.00564766, 1.99351716, -0.263496757]),
    ("rmsprop", {}, [0.498208076, -1.00018859, 1.99732041, -0.252889335]),
    ("rmsprop", {"epsilon": 0.1, "centered": True}, [0.500661552, -0.99936378, 1.99737859, -0.250285178]),
    ("adam", {}, [0.499597937, -0.998918891, 1.99793673, -0.250727952]),
    ("adam", {"wd": 0.1}, [0.499280065, -0.997924984, 1.99741423, -0.250601888]),
    ("adamax", {}, [0.49886933, -0.997866988, 1.99619532, -0.251560986]),
    ("nadam", {}, [0.499403745, -0.999962032, 1.99902928, -0.251015067]),
    ("ftrl", {"wd": 0.1}, [0.0465044081, -0.167765737, 0.442899019, -0.0287280977]),
    ("lamb", {"wd": 0.1}, [0.499618798, -0.998699605, 1.99539506, -0.251707643]),
    ("lars", {}, [0.500003099, -0.999996603, 1.99998391, -0.250008762]),
    ("lars", {"momentum": 0.9, "wd": 0.1}, [0.499997258, -0.999970317, 1.99992967, -0.24999775]),
    ("test", {}, [0.450000018, -0.950000048, 2.1500001, 0.100000024]),
]
"""What MXNet 1.9.1's own optimizers make of `WEIGHT` by `GRADS`, with its defaults and these numbers."""

OTHERWISE = [
    ("adagrad", {"epsilon": 0.1}, [0.500347376, -1.00084841, 1.99484229, -0.252796173]),
    ("adagrad", {"wd": 0.1}, [0.493028492, -0.997061491, 1.98544979, -0.258296013]),
    ("groupadagrad", {"epsilon": 0.1}, [0.500925124, -0.999510467, 1.99300694, -0.253699809]),
    ("rmsprop", {"epsilon": 0.1}, [0.500137925, -1.00014889, 1.99949133, -0.250829667]),
    ("adadelta", {"wd": 0.1}, [0.358308554, -0.73588711, 1.45422876, -0.195266277]),
    ("nag", {"momentum": 0.9, "wd": 0.1}, [0.498629332, -0.990674615, 1.97490489, -0.252990544]),
    ("adam", {"wd": 0.1, "clip_gradient": 0.2}, [0.498911023, -0.997983754, 1.99761713, -0.250435233]),
    ("adamax", {"wd": 0.1, "clip_gradient": 0.2}, [0.49781996, -0.996640444, 1.99529231, -0.251214325]),
    ("nadam", {"wd": 0.1, "clip_gradient": 0.2}, [0.499051392, -0.999091685, 1.99860263, -0.250776738]),
    ("ftml", {"wd": 0.1, "clip_gradient": 0.2}, [0.491550595, -0.992228508, 1.98792589, -0.257454485]),
    ("rmsprop", {"wd": 0.1, "clip_gradient": 0.2}, [0.497353971, -0.997694314, 1.99612117, -0.252308309]),
    ("test", {"clip_gradient": 0.2}, [0.450000018, -0.950000048, 2.1500001, 0.100000024]),
]
"""The same where the equation is another here; by so much at least: `DIFFERS`."""
DIFFERS = 2e-5

NADAM_OF_THE_FIRST_OF_TWO = [0.49932513, -0.99986583, 1.9990466, -0.25106534]
"""What 1.9.1's `nadam` makes of the first of two parameters, both of these numbers, updated in turn."""


def rows_of_the_table(heading):
    lines = DOCUMENT.read_text("utf-8").split("## From MXNet 1.9\n")[1].split("\n## ")[0].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(heading))
    table = lines[begin + 2 : next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def quiet(name, **numbers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create(name, defaults=NAME, **numbers)


def updated(optimizer, key="w"):
    weight = np.array(WEIGHT, np.float32).reshape((2, 2) if optimizer.name == "groupadagrad" else (4,))
    update = Updater(optimizer)
    for grad in GRADS:
        update(key, np.array(grad, np.float32).reshape(weight.shape), weight)
    return weight.reshape(-1)


def test_the_table_of_defaults_is_that_of_the_code():
    told = {}
    for optimizer, number, there, here in rows_of_the_table("| optimizer | number |"):
        name, number = optimizer.strip("`"), number.strip("`")
        told.setdefault(name, {})[number] = ast.literal_eval(there)
        assert getattr(create(name), number) == ast.literal_eval(here), (name, number)
        assert getattr(quiet(name), number) == ast.literal_eval(there), (name, number)
    assert told == {name: dict(numbers) for name, numbers in DEFAULTS.items() if numbers}


@each("name, numbers, expected", EQUAL)
def test_with_its_defaults_an_optimizer_does_what_it_does_in_1_9(name, numbers, expected):
    np.testing.assert_allclose(updated(quiet(name, **numbers)), expected, rtol=0, atol=TOLERANCE)


@each("name, numbers, there", OTHERWISE)
def test_another_equation_gives_other_numbers_and_a_warning(name, numbers, there):
    with pytest.warns(UserWarning, match=f"{name} has the defaults of MXNet 1.9, but not its equation: in 1.9 "):
        chosen = create(name, defaults=NAME, **numbers)
    assert np.abs(updated(chosen) - there).max() > DIFFERS


def test_the_table_of_equations_names_what_the_code_warns_of():
    rows = rows_of_the_table("| optimizer | where it shows |")
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert told == {name for name, _, _ in OTHERWISE} | {"lars", "dcasgd"}
    with pytest.warns(UserWarning, match="biases are known by their names alone"):
        create("lars", defaults=NAME)


def test_each_parameter_has_its_own_momentum_schedule_of_nadam():
    update = Updater(quiet("nadam"))
    first, second = np.array(WEIGHT, np.float32), np.array(WEIGHT, np.float32)
    for grad in GRADS:
        for key, weight in (("a", first), ("b", second)):
            update(key, np.array(grad, np.float32), weight)
    assert first.tolist() == second.tolist()
    assert np.abs(first - NADAM_OF_THE_FIRST_OF_TWO).max() > DIFFERS


def test_lars_leaves_the_momentum_as_it_is_when_the_rate_changes():
    changing = quiet("lars", momentum=0.9)
    update, weight = Updater(changing), np.ones((2, 2), np.float32)
    update("w", np.ones_like(weight), weight)
    step = 1 - float(weight[0, 0])
    changing.learning_rate = 0.0
    update("w", np.ones_like(weight), weight)
    assert 1 - float(weight[0, 0]) == pytest.approx(step * 1.9, rel=1e-3)  # 1.9 would multiply it by the new rate


def test_dcasgd_has_momentum():
    assert np.isfinite(updated(quiet("dcasgd", momentum=0.9, wd=0.1))).all()  # 1.9 raises a ValueError


@each("silent", ["sgd", "signum", "ftrl", "lamb", "dcasgd"])
def test_an_optimizer_with_the_same_equation_is_made_without_a_warning(silent, recwarn):
    create(silent, defaults=NAME, wd=0.1, clip_gradient=0.2)
    assert not [one for one in recwarn if "MXNet 1.9" in str(one.message)]


def test_numbers_that_are_given_win_and_a_schedule_keeps_its_rate():
    assert create("sgd", defaults=NAME, learning_rate=0.3).learning_rate == 0.3
    schedule = lr_scheduler.FactorScheduler(2, base_lr=0.5)
    assert create("sgd", defaults=NAME, lr_scheduler=schedule).learning_rate == 0.5


@each(
    "arguments, defaults, error, words",
    [
        ("sgd", "mxnet-1.8", ValueError, "defaults is 'mxnet-1.8'; it must be 'mxnet-1.9'"),
        ("adamw", NAME, ValueError, "MXNet 1.9 has no optimizer 'adamw'"),
        ("adabelief", NAME, ValueError, "MXNet 1.9 has no optimizer 'adabelief'"),
        ("lans", NAME, ValueError, "MXNet 1.9 has no optimizer 'lans'"),
        (create("sgd"), NAME, TypeError, r"takes no further hyper-parameters \(defaults\)"),
    ],
)
def test_defaults_that_there_are_not_are_refused(arguments, defaults, error, words):
    with pytest.raises(error, match=words):
        create(arguments, defaults=defaults)


def test_a_trainer_and_a_store_take_the_defaults_too():
    torch = pytest.importorskip("torch")
    assert Trainer(torch.nn.Linear(2, 1).parameters(), "sgd", {"defaults": NAME}).learning_rate == 0.01
    with kv.create("local") as store:
        store.set_optimizer("sgd", defaults=NAME)
        store.init("w", np.zeros(2, np.float32))
        store.push("w", np.ones(2, np.float32))
        assert store.pull("w").tolist() == [np.float32(-0.01)] * 2


@each("kind", ["local", "dist"])
def test_ftrl_leaves_rows_alone_that_have_no_gradient(kind):
    with kv.create(kind) as store:
        store.set_optimizer("ftrl")
        store.init("t", RowSparse.from_dense(np.ones((4, 2), np.float32)))
        store.init("lazy", LazyRows((4, 2), initializer="constant(1)"))
        for key in ("t", "lazy"):
            store.push(key, RowSparse([1], np.full((1, 2), 0.5, np.float32), (4, 2)))
            rows = store.row_sparse_pull(key, row_ids=np.arange(4)).values[:, 0]
            np.testing.assert_allclose(rows, [1, 0.2993333041667938, 1, 1], rtol=1e-6)  # as MXNet 1.9.1
