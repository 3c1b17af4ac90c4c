"""The rows of docs/mxnet.md that say "not offered": what a script finds in their place."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import kvdist
from kvdist import Trainer, kv, optimizer, profiler
from kvdist.config.environment import without_effect
from kvdist_launch.cli import main
from tests.cases import each

DOCUMENT = Path(__file__).parents[1] / "docs" / "mxnet.md"
NOT_OFFERED = re.compile(r"^\| (.*?) \| not offered \| (.*) \|$", re.MULTILINE)
NAME = re.compile(r"[A-Z0-9_]+")
CSR = ((0, 1, 2), (0, 1), (1.0, 1.0))


def rows(after: str, before: str = "") -> list[str]:
    text = DOCUMENT.read_text().split(f"\n## {after}\n")[1]
    return [first for first, _ in NOT_OFFERED.findall(text.split("\n## ")[0])]


def absent(*names: str, of: object = kvdist) -> bool:
    """Whether each name is an error that has it."""
    for name in names:
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(of, name)
    return True


@contextlib.contextmanager
def local():
    with kv.create("local") as store:
        store.init("w", np.zeros((2, 2), np.float32))
        yield store


def refused(error: type[Exception], words: str, call, *args, **kwargs) -> bool:
    with pytest.raises(error, match=words):
        call(*args, **kwargs)
    return True


def csr() -> bool:
    with local() as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about csr tensors
        array = torch.sparse_csr_tensor(*map(torch.tensor, CSR))
        return refused(TypeError, "'w': .*layout torch.sparse_csr", store.push, "w", array)


def of_the_c_api() -> bool:
    with local() as store:
        return absent("set_barrier_before_exit", of=store) and absent("MXInitPSEnv")


def unknown_numbers(*names: str) -> bool:
    given = torch.nn.Parameter(torch.ones(1))
    return all(
        refused(TypeError, f"sgd has no hyper-parameter {name}; it takes learning_rate, ", make, numbers)
        for name in names
        for numbers in [{name: 1}]
        for make in (lambda own: optimizer.create("sgd", **own), lambda own: Trainer([given], "sgd", own))
    )


def lists() -> bool:
    updater, arrays = optimizer.Updater(optimizer.create("sgd")), [np.ones(2, np.float32)] * 2
    return refused(TypeError, "call it once for each key", updater, [0, 1], arrays, arrays)


def in_parts_of_one_length() -> bool:
    """`SplitSampler` in place of `shard`: 7 examples, 3 workers."""
    parts = [list(kvdist.SplitSampler(7, 3, index, shuffle=False)) for index in range(3)]
    assert {len(part) for part in parts} == {2} and sorted(one for part in parts for one in part) == list(range(6))
    return absent("Dataset")


def samplers_of_torch() -> bool:
    loader = torch.utils.data.DataLoader(torch.arange(7), batch_size=3, drop_last=True)
    assert [len(batch) for batch in loader] == [3, 3]
    return absent("SequentialSampler", "RandomSampler", "BatchSampler", "DataLoader")


def lists_of_indices() -> bool:
    """The two lists of the row: of the examples that a function wants, and every third from each beginning."""
    n, k = 7, 3
    for indices in ([i for i in range(n) if i % 2], [j for i in range(k) for j in range(i, n, k)]):
        loader = torch.utils.data.DataLoader(torch.arange(n), batch_size=None, sampler=indices)
        assert list(map(int, loader)) == indices
    return absent("FilterSampler", "IntervalSampler")


def unknown_optimizers() -> bool:
    return all(refused(ValueError, f"unknown optimizer '{one}': known are ", optimizer.create, one) for one in LOST)


LOST = ("LBSGD", "ccSGD")
EVENTS = ("Domain", "Task", "Frame", "Event", "Counter", "Marker", "scope")
OLD_PROFILER = ("profiler_set_config", "profiler_set_state", "dump_profile")
CASES = {
    "`teststore`": lambda: refused(ValueError, "register a class of your own called TestStore", kv.create, "teststore"),
    "`MXNET_KVSTORE_USETREE=1` and the like": lambda: without_effect({"MXNET_KVSTORE_USETREE": "1"}),
    "`csr` arrays": csr,
    "`set_barrier_before_exit` of the C API": of_the_c_api,
    "`MXInitPSEnv` of the C API": of_the_c_api,
    "`KVStoreServer(kvstore).run()`": lambda: absent("KVStoreServer") and absent("KVStoreServer", of=kv),
    "`Dataset.shard(num_shards, index)`": in_parts_of_one_length,
    "`SequentialSampler`, `RandomSampler`, `BatchSampler`, `DataLoader`": samplers_of_torch,
    "`FilterSampler`, `IntervalSampler`": lists_of_indices,
    "`gluon.utils.clip_global_norm(arrays, max_norm)`": lambda: absent("clip_global_norm"),
    "`Module.fit(kvstore=…)`, `Estimator`": lambda: absent("Module", "Estimator"),
    "`Updater.sync_state_context(state, context)`": lambda: absent("sync_state_context", of=optimizer.Updater),
    "`Updater` called with lists": lists,
    "`param_idx2name`, `sym`, `param_dict`": lambda: unknown_numbers("param_idx2name", "sym", "param_dict"),
    "`begin_num_update`": lambda: unknown_numbers("begin_num_update"),
    "`aggregate_num`, `use_fused_step`": lambda: unknown_numbers("aggregate_num", "use_fused_step"),
    "LBSGD, ccSGD": unknown_optimizers,
    "`dumps()`": lambda: absent("dumps", of=profiler),
    ", ".join(f"`{name}`" for name in EVENTS): lambda: absent(*EVENTS, of=profiler),
    ", ".join(f"`{name}`" for name in OLD_PROFILER): lambda: absent(*OLD_PROFILER, of=profiler),
}
LAUNCHER = {
    "`--launcher sge`, `yarn`": [(["--launcher", "sge"], "choice: 'sge'"), (["--launcher", "yarn"], "choice: 'yarn'")],
    "`--p3`": [(["--p3"], "unknown option --p3")],
    "`--env NAME`": [(["--env", "LR"], "'LR' does not set a variable; write NAME=VALUE")],
}
SILENT = {
    *(
        "DMLC_TASK_ID",
        "DMLC_JOB_CLUSTER",
        "DMLC_NUM_ATTEMPT",
        "DMLC_SUBMIT_CLUSTER",
        "DMLC_WORKER_ID",
        "DMLC_SERVER_ID",
    ),
    *("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_WORKER_CORES", "DMLC_WORKER_MEMORY_MB", "DMLC_SERVER_CORES"),
    *("DMLC_SERVER_MEMORY_MB", "DMLC_JOB_ARCHIVES", "DMLC_HDFS_OPTS"),
    *("MXNET_CPU_WORKER_NTHREADS", "MXNET_CPU_PRIORITY_NTHREADS", "MXNET_ENABLE_GPU_P2P", "MXNET_PROFILER_MODE"),
    *("PORT", "DMLC_USE_IBVERBS", "DMLC_LOG_STACK_TRACE_DEPTH"),
}
"""Variables of launchers, those that MXNet itself reads beside its stores, and three more: nothing is said of them."""


NEW_METHODS = re.compile(r"^\| \| new \| (.*) \|$", re.MULTILINE)
OTHER_WORDS = (("adagrad", "eps", "epsilon"), ("groupadagrad", "eps", "epsilon"))
OTHER_WORDS += (("rmsprop", "gamma1", "rho"), ("rmsprop", "gamma2", "momentum"))


def test_every_row_has_a_case():
    sections = ("Stores", "Methods of a store", "Trainer", "Optimizers and schedules", "Profiler")
    assert [row for section in sections for row in rows(section)] == list(CASES)
    assert rows("Launcher") == list(LAUNCHER)
    everything = DOCUMENT.read_text().count("| not offered |")
    assert everything == len(CASES) + len(LAUNCHER) + len(rows("Environment variables"))


@each("row", CASES)
def test_what_is_not_offered_is_refused_by_name_or_done_as_the_row_says(row):
    assert CASES[row]()


@each("row, words, message", [(row, *case) for row, cases in LAUNCHER.items() for case in cases])
def test_options_that_are_not_offered_are_refused_by_name(capfd, row, words, message):
    with contextlib.suppress(SystemExit):
        assert main(["-n1", *words, "true"]) == 2
    assert message in capfd.readouterr().err


def test_variables_that_are_not_offered_are_warned_of():
    listed = [name for row in rows("Environment variables") for name in NAME.findall(row)]
    warned = [name for name in listed if without_effect({name: "1"})]
    assert set(listed) - set(warned) == SILENT and len(warned) > 10
    for name in warned:
        (sentence,) = without_effect({name: "1"})
        assert sentence.startswith(f"{name} has no effect: ")


def test_the_new_methods_are_there():
    (row,) = NEW_METHODS.findall(DOCUMENT.read_text())
    names = re.findall(r"`(\w+)`", row)
    assert len(names) > 10 and all(hasattr(kv.KVStore, name) for name in names)


@each("name, word, ours", OTHER_WORDS)
def test_words_of_1_9_are_refused_with_ours(name, word, ours):
    with pytest.raises(TypeError, match=rf"{name} has no hyper-parameter {word} \(here it is called {ours}\)"):
        optimizer.create(name, **{word: 0.5})


def test_the_rate_that_adadelta_has_only_here_is_1():
    assert optimizer.create("adadelta").learning_rate == 1


def test_keys_of_a_call_are_handled_in_the_order_given_and_may_be_any_numbers():
    keys, seen = [5, 215_330, 2**40, 1], []
    with kv.create("local") as store:
        store.init(keys, [np.zeros(1, np.float32)] * 4)
        store.set_updater(lambda key, received, stored: seen.append(key))
        store.push(keys, [np.ones(1, np.float32)] * 4)
    assert seen == keys
