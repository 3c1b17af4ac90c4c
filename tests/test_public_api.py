"""The names that users import exist, are documented, and are no more than meant."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import subprocess
import sys
from importlib import metadata

import pytest

import kvdist
from kvdist import KVStore, Trainer, kv
from tests import surface
from tests.cases import each

STORE = [
    "average",
    "barrier",
    "broadcast",
    "close",
    "empty",
    "from_rank_0",
    "has_optimizer",
    "init",
    "is_capable",
    "leave_uncompressed",
    "num_dead_nodes",
    "num_servers",
    "num_workers",
    "pull",
    "pull_async",
    "push",
    "push_async",
    "pushpull",
    "pushpull_async",
    "rank",
    "row_sparse_pull",
    "row_sparse_pull_async",
    "send_command_to_servers",
    "set_gradient_compression",
    "set_optimizer",
    "set_updater",
    "type",
]
TRAINER = [
    "allreduce_grads",
    "as_torch_optimizer",
    "broadcast_parameters",
    "kvstore",
    "learning_rate",
    "nonfinite_steps",
    "optimizer",
    "set_learning_rate",
    "skip_step",
    "step",
    "update",
]
OPTIMIZERS = [
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "dcasgd", "ftml", "ftrl", "groupadagrad", "lamb",
    "lans", "lars", "nadam", "nag", "rmsprop", "sgd", "sgld", "signum", "test",
]  # fmt: skip
SCHEDULERS = ["CosineScheduler", "FactorScheduler", "MultiFactorScheduler", "PolyScheduler"]


def public(owner):
    return sorted(name for name in dir(owner) if not name.startswith("_"))


@each("name", kvdist.__all__)
def test_an_exported_name_exists_and_is_documented(name):
    value = getattr(kvdist, name)
    if name == "__version__":
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*", value)
    else:
        first_line = (inspect.getdoc(value) or "").split("\n")[0]
        assert first_line.endswith("."), f"the first line of {name} is not a sentence"


def test_dir_lists_the_exported_names_and_no_name_twice():
    assert dir(kvdist) == sorted(kvdist.__all__)
    assert len(set(kvdist.__all__)) == len(kvdist.__all__)


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kvdist' has no attribute 'nothing'"):
        kvdist.nothing  # noqa: B018


@each(
    "name, instead",
    [
        ("ssp", "kvdist.asynchronous()"),
        ("StaleSynchronous", "kvdist.asynchronous()"),
        ("backup", "kvdist.quota(samples)"),
        ("Backup", "kvdist.quota(samples)"),
        ("buffered", "kvdist.asynchronous(damping='sqrt') or kvdist.quota(samples)"),
        ("Buffered", "kvdist.asynchronous(damping='sqrt') or kvdist.quota(samples)"),
    ],
)
def test_a_name_that_was_removed_is_an_error_that_names_the_replacement(name, instead):
    message = f"^{re.escape(f'kvdist.{name} was removed: use {instead}')}$"
    with pytest.raises(ImportError, match=message):
        getattr(kvdist, name)
    with pytest.raises(ImportError, match=message):
        exec(f"from kvdist import {name}")
    assert name not in dir(kvdist)


def test_every_error_is_exported_and_can_be_caught_by_its_root():
    errors = importlib.import_module("kvdist.errors")
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert all(issubclass(value, kvdist.KvdistError) and getattr(kvdist, value.__name__) is value for value in classes)


@each(
    "error, builtin",
    [
        (kvdist.ConfigError, ValueError),
        (kvdist.KeyNotInitialised, KeyError),
        (kvdist.InitMismatch, ValueError),
        (kvdist.OptimizerMismatch, ValueError),
        (kvdist.PushRefused, ValueError),
        (kvdist.StoreClosed, RuntimeError),
        (kvdist.ForkError, RuntimeError),
        (kvdist.DeadlineExceeded, TimeoutError),
        (kvdist.DeviceError, RuntimeError),
        (kvdist.BarrierTimeout, kvdist.DeadlineExceeded),
        (kvdist.PeerLostError, ConnectionError),
    ],
)
def test_an_error_is_also_the_builtin_that_a_python_user_would_expect(error, builtin):
    assert issubclass(error, builtin)


def test_a_key_error_prints_as_a_sentence():
    assert str(kvdist.KeyNotInitialised("key 'a' has not been initialised")) == "key 'a' has not been initialised"


@each("name", STORE)
def test_a_method_of_a_store_is_documented(name):
    assert inspect.getdoc(getattr(KVStore, name))


def test_stores_have_the_promised_names():
    assert set(STORE) <= set(public(KVStore))


@each("name", TRAINER)
def test_a_method_of_the_trainer_is_documented(name):
    assert inspect.getdoc(getattr(Trainer, name))


def test_arguments_of_the_mirrored_systems_calls_keep_names_order_and_defaults():
    expected = {
        "init": "key, value",
        "push": "key, value, priority=0",
        "pull": "key, out=None, priority=0, ignore_sparse=True",
        "pushpull": "key, value, out=None, priority=0",
        "broadcast": "key, value, out, priority=0",
        "row_sparse_pull": "key, out=None, priority=0, row_ids=None",
        "barrier": "timeout=None",
    }
    for name, wanted in expected.items():
        parameters = list(inspect.signature(getattr(KVStore, name)).parameters.values())[1:]
        positional = [p.replace(annotation=p.empty) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert ", ".join(map(str, positional)) == wanted


@each("name", OPTIMIZERS)
def test_the_promised_optimizers_are_created_by_name(name):
    assert kvdist.optimizer.create(name).name == name


@each("name", OPTIMIZERS)
def test_an_optimizer_says_its_formula(name):
    documented = inspect.getdoc(type(kvdist.optimizer.create(name)))
    assert "w ←" in documented and documented.split("\n")[0]


@each("name", SCHEDULERS)
def test_the_promised_schedules_are_documented(name):
    assert inspect.getdoc(getattr(kvdist.lr_scheduler, name))
    assert name in kvdist.lr_scheduler.__all__


def test_arguments_of_schedules_keep_the_mirrored_systems_names_and_order():
    warm_up = ["base_lr", "warmup_steps", "warmup_begin_lr", "warmup_mode"]
    expected = {
        "FactorScheduler": ["step", "factor", "stop_factor_lr", *warm_up],
        "MultiFactorScheduler": ["step", "factor", *warm_up],
        "PolyScheduler": ["max_update", "base_lr", "pwr", "final_lr", *warm_up[1:]],
        "CosineScheduler": ["max_update", "base_lr", "final_lr", *warm_up[1:]],
    }
    for name, wanted in expected.items():
        assert list(inspect.signature(getattr(kvdist.lr_scheduler, name)).parameters) == wanted


def test_kv_offers_create_and_register():
    assert {"create", "register", "KVStore", "KVStoreBase"} <= set(kv.__all__)
    assert kv.create.__doc__ and kv.register.__doc__


def test_a_plain_import_loads_no_heavy_library():
    heavy = ["torch", "numba", "cupy", "zmq", "msgpack", "numpy"]
    program = f"import sys, kvdist; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "[]"


def test_a_store_on_a_cluster_of_numpy_arrays_needs_no_torch():
    program = (
        "import sys, numpy; from kvdist import kv; store = kv.create('dist'); store.init(1, numpy.ones(3));"
        "store.pushpull(1, numpy.ones(3)); store.close(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "False"


def test_what_needs_torch_says_so_where_torch_is_missing():
    program = """
import sys
sys.modules["torch"] = None
import kvdist
for name in ("Trainer", "Embedding", "horovod", "collective"):
    try:
        getattr(kvdist, name)
    except ImportError as error:
        print(error)
try:
    import kvdist.horovod
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.splitlines() == [
        f"kvdist.{name} needs torch, which is not installed: pip install 'torch>=2.1'"
        for name in ("Trainer", "Embedding", "horovod", "collective", "horovod")
    ]


def test_an_installed_package_says_the_version_that_the_module_says():
    try:
        installed = metadata.version("kvdist")
    except metadata.PackageNotFoundError:
        pytest.skip("kvdist is not installed here as a package")
    assert installed == kvdist.__version__


def test_what_users_rely_on_is_as_it_was_meant():
    meant, found = surface.FILE.read_text("utf-8").splitlines(), surface.lines()
    difference = list(difflib.unified_diff(meant, found, "meant", "found", n=0, lineterm=""))
    assert not difference, (
        "names, options or settings of users have changed; if that is meant, say it in CHANGELOG.md and run"
        " python -m tests.surface --write:\n" + "\n".join(difference)
    )
