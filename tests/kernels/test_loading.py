"""How compiled kernels come into a process: in the background, at the right time, and harmlessly when they cannot."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import ConfigError
from kvdist.kernels.cpu import Loader, choose
from kvdist.kernels.interface import Equation
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create
from kvdist.optimizer.sgd import sgd

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 150
"""For numba to be imported and to compile, on a machine that does other things beside it."""


class Backend:
    """A backend whose kernels are names, and which can be held up while it builds one."""

    def __init__(self):
        self.imported = 0
        self.built = []
        self.building = threading.Event()
        self.may_build = threading.Event()
        self.may_build.set()
        self.threads = set()

    def __call__(self):
        self.imported += 1
        return "backend 1", self.build

    def build(self, name):
        self.threads.add(threading.current_thread())
        self.building.set()
        assert self.may_build.wait(TIMEOUT_S)
        self.built.append(name)
        return lambda: name


def absent():
    raise ImportError("No module named 'numba'")


def test_nothing_is_imported_before_there_is_work_enough():
    loader = Loader(backend := Backend(), worth_elements=1000)
    for _ in range(9):
        assert loader.offered("sum", 100) is None
    assert loader.wait(TIMEOUT_S) and backend.imported == 0
    assert loader.offered("sum", 100) is None
    assert loader.wait(TIMEOUT_S)
    assert loader.offered("sum", 1)() == "sum"


def test_who_asks_is_not_held_up_while_a_kernel_is_built():
    loader = Loader(backend := Backend(), worth_elements=1)
    backend.may_build.clear()
    assert loader.offered("a", 1) is None
    assert backend.building.wait(TIMEOUT_S)
    assert loader.offered("a", 1) is None and loader.offered("b", 1) is None
    assert not loader.wait(0.0)
    backend.may_build.set()
    assert loader.wait(TIMEOUT_S)
    assert backend.built == ["a", "b"]
    assert threading.current_thread() not in backend.threads


def test_a_kernel_that_is_wanted_after_the_thread_has_ended_is_built_too():
    loader = Loader(backend := Backend(), worth_elements=1)
    for name in ("a", "b"):
        assert loader.offered(name, 1) is None
        assert loader.wait(TIMEOUT_S)
    assert backend.built == ["a", "b"]
    assert len(backend.threads) == 2 and not any(thread.is_alive() for thread in backend.threads)


def test_a_demanded_kernel_is_there_at_once_and_built_once():
    loader = Loader(backend := Backend())
    assert loader.demanded("a", 1)() == loader.demanded("a", 1)() == "a"
    assert backend.built == ["a"] and backend.threads == {threading.current_thread()}


def test_at_the_end_the_kernel_in_the_making_is_finished_and_no_other_begun():
    loader = Loader(backend := Backend(), worth_elements=1)
    backend.may_build.clear()
    loader.offered("a", 1)
    assert backend.building.wait(TIMEOUT_S)
    loader.offered("b", 1)
    halting = threading.Thread(target=loader.halt)
    halting.start()
    backend.may_build.set()
    halting.join(TIMEOUT_S)
    assert not halting.is_alive() and loader.wait(0.0)
    loader.offered("c", 1)
    assert loader.wait(0.0) and set(backend.built) <= {"a", "b"}


def test_a_fork_meets_no_thread_and_both_sides_go_on_afterwards():
    loader = Loader(backend := Backend(), worth_elements=1)
    loader.offered("a", 1)
    loader.before_fork()
    assert not any(thread.is_alive() for thread in backend.threads)
    loader.after_fork()
    loader.offered("a", 1)
    loader.offered("b", 1)
    assert loader.wait(TIMEOUT_S)
    assert loader.offered("a", 1)() == "a" and loader.offered("b", 1)() == "b"


def test_without_numba_the_reference_works_and_it_is_said_once(caplog):
    caplog.set_level(logging.INFO, "kvdist")
    loader = Loader(absent, worth_elements=1)
    kernels = choose("auto", loader)
    out = np.empty(3, np.float32)
    for _ in range(3):
        kernels.weighted_sum([np.ones(3, np.float32)] * 3, [1.0] * 3, DType.FLOAT32, out)
        assert loader.wait(TIMEOUT_S)
    assert (out == 3).all()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["numba cannot be imported"]


def test_a_compiler_that_fails_is_reported_and_the_reference_works(caplog):
    def broken(name):
        raise RuntimeError("no such instruction")

    loader = Loader(lambda: ("backend 1", broken), worth_elements=1)
    assert loader.offered("a", 1) is None
    assert loader.wait(TIMEOUT_S)
    assert loader.offered("a", 1) is None and loader.wait(0.0)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "numba failed (RuntimeError: no such instruction): kernels stay NumPy's, which are slower"
    ]


def test_numba_by_name_is_an_error_where_it_is_absent():
    with pytest.raises(ConfigError, match=r"KVDIST_KERNELS is 'numba', but .*No module named 'numba'.*pip install"):
        choose("numba", Loader(absent))


def test_numpy_by_name_is_the_reference():
    assert choose("numpy", Loader(absent)) is REFERENCE


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_going_over_in_the_middle_gives_the_weights_of_never_going_over(name):
    pytest.importorskip("numba")
    from kvdist.kernels import numba_cpu

    loader = Loader(lambda: (numba_cpu.VERSION, numba_cpu.build), worth_elements=5 * 1001)
    weights = []
    for kernels in (choose("auto", loader), REFERENCE):
        updater, weight = Updater(create(name, wd=0.01), kernels), np.linspace(-1, 1, 1001, dtype=np.float32)
        for step in range(6):
            rng = np.random.default_rng(step)
            grads = [rng.standard_normal(1001).astype(np.float32) for _ in range(2)]
            updater.update(0, weight, grads, [0.5, 0.5], DType.FLOAT32, weight)
            assert loader.wait(TIMEOUT_S)
            if kernels is not REFERENCE:
                assert (loader.version != "") == (step >= 2)
        weights.append(weight.view(np.uint32))
    np.testing.assert_array_equal(*weights)


def test_a_rule_is_compiled_when_it_is_first_used():
    pytest.importorskip("numba")
    from kvdist.kernels import numba_cpu

    built = []

    def build(name):
        built.append(str(name))
        return numba_cpu.build(name)

    kernels = choose("numba", Loader(lambda: (numba_cpu.VERSION, build)))
    weight, grad = np.ones(5, np.float32), np.ones(5, np.float32)
    assert built == []
    for name, so_far in (
        ("adam", ["adam_float32"]),
        ("adam", ["adam_float32"]),
        ("nag", ["adam_float32", "nag_float32"]),
    ):
        Updater(create(name), kernels).update("w", weight, [grad], [1.0], DType.FLOAT32, weight)
        assert built == so_far


def test_an_expression_that_cannot_be_compiled_is_evaluated_and_others_are_compiled(caplog):
    pytest.importorskip("numba")
    from kvdist.kernels import numba_cpu

    def unheard_of(grad, weight, lr):
        return weight - np.asarray(memoryview(grad)) * lr

    kernels = choose("numba", Loader(lambda: (numba_cpu.VERSION, numba_cpu.build)))
    weight, grad = np.ones(5, np.float32), np.ones(5, np.float32)
    for _ in range(2):
        equation = Equation(unheard_of, (0.5,))
        assert not kernels.fused_update(equation, weight, [grad], [1.0], None, weight, [], DType.FLOAT32)
    assert (weight == 1).all()
    assert [record.getMessage()[:57] for record in caplog.records if record.levelno == logging.WARNING] == [
        "numba cannot compile unheard_of_float32, which NumPy compu"[:57]
    ]
    assert kernels.fused_update(Equation(sgd, (0.5, 0.0)), weight, [grad], [1.0], None, weight, [], DType.FLOAT32)
    assert (weight == 0.5).all()


def test_an_expression_with_a_literal_number_is_evaluated_and_the_number_is_named(caplog):
    pytest.importorskip("numba")
    from kvdist.kernels import numba_cpu

    def thirds(grad, weight, lr):
        return weight - grad * 0.3 * lr if lr != 0 else weight

    kernels = choose("numba", Loader(lambda: (numba_cpu.VERSION, numba_cpu.build)))
    weight = np.ones(5, np.float32)
    equation = Equation(thirds, (0.5,))
    assert not kernels.fused_update(equation, weight, [weight], [1.0], None, weight, [], DType.FLOAT32)
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "thirds has the number 0.3" in message and "pass it with the numbers of the Equation" in message


# In processes of their own: what an interpreter does at its ends, and with other caches.

SUM = """
import sys
{before}
import numpy as np
from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.cpu import LOADER
out = np.empty(1 << 20, np.float32)
kernels = choose({setting!r})
kernels.weighted_sum([np.ones(1 << 20, np.float32)] * 3, [1.0] * 3, DType.FLOAT32, out)
{after}
assert (out == 3).all()
print("fine", LOADER.version.split(" ")[0], LOADER.failure)
"""


def interpreter(before="", after="", setting="auto", **environ):
    """The output of a process that sums three large arrays."""
    code = SUM.format(before=before, after=after, setting=setting)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_process_without_numba_works_like_any_other():
    said = interpreter(before="sys.modules['numba'] = None", after=f"LOADER.wait({TIMEOUT_S})")
    assert said.startswith("fine  import of numba halted")


def test_an_interpreter_may_end_and_fork_while_kernels_are_being_loaded():
    pytest.importorskip("numba")
    assert interpreter().startswith("fine")
    fork = "import os\nchild = os.fork()\nif child: assert os.waitpid(child, 0)[1] == 0"
    assert interpreter(after=fork).count("fine") == 2


def test_a_cache_is_written_but_may_be_damaged_or_impossible(tmp_path):
    pytest.importorskip("numba")
    cache = tmp_path / "cache"
    assert interpreter(setting="numba", NUMBA_CACHE_DIR=str(cache)) == "fine numba None"
    (compiled,) = cache.rglob("*.nbc")
    compiled.write_bytes(b"")  # as after a loss of power
    assert interpreter(setting="numba", NUMBA_CACHE_DIR=str(cache)) == "fine numba None"
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert interpreter(setting="numba", NUMBA_CACHE_DIR=str(in_the_way / "cache")) == "fine numba None"


RULE = """
from kvdist.kernels.elementwise import decayed

def moved(weight, step):
    "The new weight."
    return weight {sign} step

def own(grad, weight, lr, wd):
    "A rule."
    return moved(weight, decayed(grad, weight, wd) * lr)
"""
UPDATE = """
import numpy as np
from own_rule import own
from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import Equation
weight, grad = np.ones(3, np.float32), np.ones(3, np.float32)
assert choose("numba").fused_update(Equation(own, (0.5, 0.0)), weight, [grad], [1.0], None, weight, [], DType.FLOAT32)
print(weight[0])
"""


def test_a_changed_rule_is_not_served_from_the_cache_and_an_unchanged_one_is(tmp_path):
    """The change is in a function that the rule calls, and the file has the same length."""
    pytest.importorskip("numba")
    cache = tmp_path / "cache"
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    kernels = []
    for sign, wanted in (("-", "0.5"), ("+", "1.5"), ("-", "0.5")):
        (tmp_path / "own_rule.py").write_text(RULE.format(sign=sign))
        argv = [sys.executable, "-c", UPDATE]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", wanted)
        kernels.append(sorted((path.name, path.stat().st_mtime_ns) for path in cache.rglob("*.own_float32_*.nbc")))
    assert [len(found) for found in kernels] == [1, 2, 2]
    assert kernels[1] == kernels[2]
