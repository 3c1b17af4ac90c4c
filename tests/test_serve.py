"""The scheduler and servers: exit codes, and the launcher's lines. What they do in a cluster is in `integration/`."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import pytest

from kvdist import serve
from kvdist.__main__ import main
from kvdist.config.environment import read_setting
from kvdist.config.exit_codes import EXIT_CONFIG
from kvdist.config.sockets import SCHEME, listen_at, local_endpoint, require_private_folder
from kvdist.core.machine import ChildEnded, ProcessStarted
from kvdist.errors import ConfigError, DeviceError
from kvdist.kernels import gpu
from kvdist.kvstore import registry as store_registry
from kvdist.nodes import SCHEDULER, server, worker
from kvdist.optimizer import create, registry
from tests.cases import each
from tests.ports import free_port

CLUSTER = {
    "DMLC_ROLE": "scheduler",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "1",
    "DMLC_NUM_SERVER": "1",
}


@each(
    "line, event",
    [
        ("ended worker 0 exit 0\n", ChildEnded(worker(0), "exited with code 0", clean=True)),
        ("ended worker 12 exit 3", ChildEnded(worker(12), "exited with code 3", clean=False)),
        ("ended server 1 signal 9\n", ChildEnded(server(1), "killed by signal 9 (SIGKILL)", clean=False)),
        ("ended server 1 signal 250\n", ChildEnded(server(1), "killed by signal 250 (unknown)", clean=False)),
        ("ended scheduler 0 exit 0\n", ChildEnded(SCHEDULER, "exited with code 0", clean=True)),
        (
            "ended worker 1 lost d2\n",
            ChildEnded(worker(1), "lost with its host d2, which the launcher cannot reach any more", clean=False),
        ),
        ("ended worker 0 exit 3 life 2", ChildEnded(worker(0), "exited with code 3", False, life=2)),
        ("placed worker 1 d2 4242\n", ProcessStarted(worker(1), "d2", 4242)),
    ],
)
def test_a_launchers_line_tells_what_it_did_and_saw(line, event):
    assert serve.parse_report(line) == event


@each(
    "line",
    [
        "",
        "\n",
        "ended",
        "ended worker 1 signal",
        "ended worker 1 signal 9 9",
        "ended worker -1 signal 9",
        "ended worker one signal 9",
        "ended worker 1 signal KILL",
        "ended worker 1 vanished 9",
        "ended wizard 1 exit 0",
        "ended worker 1 exit 0 life two",
        "ended worker 1 exit 0 life",
        "started worker 1 exit 0",
        "placed worker 1 d2",
        "placed worker 1 d2 pid",
        "placed wizard 1 d2 4242",
        "ended worker ² exit 0",
    ],
)
def test_a_line_of_another_form_tells_nothing(line):
    assert serve.parse_report(line) is None


@each(
    "variables, sentence",
    [
        ({"DMLC_ROLE": "worker"}, "python -m kvdist runs a scheduler or a server, and DMLC_ROLE says neither"),
        (CLUSTER | {"DMLC_ROLE": "worker"}, "workers run your own script. kvdist-launch starts all three"),
        (CLUSTER | {"DMLC_ROLE": "wizard"}, "DMLC_ROLE is 'wizard'; it must be scheduler, server or worker"),
        (CLUSTER | {"DMLC_NUM_WORKER": "none"}, "DMLC_NUM_WORKER is 'none'; it must be a whole number"),
        ({"DMLC_ROLE": "server"}, "the environment describes half a cluster"),
        (CLUSTER | {"DMLC_PS_ROOT_URI": "0.0.0.0"}, "0.0.0.0 can be reached from other machines"),
        (CLUSTER | {"KVDIST_SERVER_DEVICE": "gpu"}, "KVDIST_SERVER_DEVICE is 'gpu'; it must be cpu"),
        (
            CLUSTER | {"DMLC_ROLE": "server", "KVDIST_SERVER_DEVICE": "cuda:0,cpu"},
            "KVDIST_SERVER_DEVICE is 'cuda:0,cpu', which servers take in turn",
        ),
        (CLUSTER | {"DMLC_ROLE": "server", "DMLC_NODE_HOST": "0.0.0.0"}, "0.0.0.0 can be reached from other machines"),
    ],
)
def test_a_mistake_in_the_environment_is_one_sentence_and_exit_code_2(monkeypatch, capsys, variables, sentence):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([]) == EXIT_CONFIG == 2
    told = capsys.readouterr()
    assert told.err.startswith("kvdist: ") and told.err.count("\n") == 1 and sentence in told.err
    assert told.out == ""


@each("by", ["option", "variable"])
def test_a_server_without_its_gpu_ends_in_one_sentence_before_it_listens_anywhere(monkeypatch, capsys, by):
    def fail(index, otherwise):
        raise DeviceError(f"there is no GPU {index}")

    monkeypatch.setattr(gpu, "open_gpu", fail)
    monkeypatch.setattr(serve, "open_transport", None)
    for name, value in (CLUSTER | {"DMLC_ROLE": "server", "DMLC_NUM_SERVER": "2", "KVDIST_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KVDIST_SERVER_DEVICE", "cpu" if by == "option" else "cpu,cuda:7")
    assert main(["--server-device", "cpu,cuda:7"] if by == "option" else []) == 1
    told = capsys.readouterr().err
    assert told.startswith("kvdist: this server was to sum and update on cuda:7, and without --server-device")
    assert told.endswith(": there is no GPU 7\n") and told.count("\n") == 1


def test_a_device_that_the_command_line_misnames_is_a_mistake(monkeypatch, capsys):
    for name, value in (CLUSTER | {"DMLC_ROLE": "server"}).items():
        monkeypatch.setenv(name, value)
    assert main(["--server-device", "cuda"]) == EXIT_CONFIG
    assert "kvdist: --server-device is 'cuda'; it must be cpu, cuda:0" in capsys.readouterr().err


@pytest.mark.parametrize("restarts, code, why", [("1", 0, "the job was over"), (None, 2, "start the job again")])
def test_a_scheduler_whose_socket_has_lost_its_file_says_so(monkeypatch, capsys, restarts, code, why):
    port = free_port()
    path = local_endpoint(port).removeprefix(SCHEME)
    require_private_folder()
    listening = listen_at(path)
    os.unlink(path)
    variables = CLUSTER | {"DMLC_PS_ROOT_PORT": str(port), "KVDIST_LISTEN_FD": str(listening.fileno())}
    variables |= {} if restarts is None else {"KVDIST_RESTARTS": restarts}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with listening:
        assert main([]) == code
    told = capsys.readouterr().err
    assert told.startswith("kvdist: ") and told.count("\n") == 1 and path in told and why in told


def test_an_interruption_ends_with_the_code_of_a_shell(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "cluster_from_env", interrupt)
    monkeypatch.setenv("DMLC_ROLE", "server")
    assert main([]) == 128 + signal.SIGINT


# Modules with optimizers of the operator's own.

RULE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from kvdist.optimizer import Optimizer, register


@register
@dataclass(kw_only=True, eq=False)
class Halving(Optimizer):
    name: ClassVar[str] = "halving_of_test_main"

    @property
    def state_names(self):
        return ()

    def apply(self, weight, grad, out, state, scratch, step):
        np.multiply(weight, 0.5, out=out)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_module_that_the_operator_names_makes_its_optimizers_known(folder):
    (folder / "rules_of_test_main.py").write_text(RULE)
    serve.import_optimizers(["rules_of_test_main"])
    assert create("halving_of_test_main").name == "halving_of_test_main"
    assert "rules_of_test_main" in sys.modules


def test_a_module_that_another_one_has_imported_may_be_named_too(folder):
    (folder / "inner_of_test_main.py").write_text(RULE.replace("halving", "thirding"))
    (folder / "outer_of_test_main.py").write_text("import inner_of_test_main\n" + RULE.replace("halving", "outer"))
    serve.import_optimizers(["outer_of_test_main", "inner_of_test_main"])


@each(
    "text, words",
    [
        (None, r"cannot be imported \(ModuleNotFoundError: No module named 'broken_of_test'\).*or on PYTHONPATH"),
        ("1 / 0", r"cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("x = 1", r"registers no optimizer: decorate its classes with @kvdist\.optimizer\.register"),
    ],
)
def test_a_module_that_is_of_no_use_is_named_with_the_reason(folder, monkeypatch, text, words):
    monkeypatch.delitem(sys.modules, "broken_of_test", raising=False)
    if text is not None:
        (folder / "broken_of_test.py").write_text(text)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=f"the optimizer module broken_of_test {words}"):
        serve.import_optimizers(["broken_of_test"])
    monkeypatch.delitem(sys.modules, "broken_of_test", raising=False)


COMMAND = """
from kvdist import kv


@kv.register_command(1_900_000_001)
def note(head, body, rank):
    pass
"""


@pytest.fixture
def handlers(monkeypatch):
    fresh = {}
    monkeypatch.setattr(store_registry, "HANDLERS", fresh)
    monkeypatch.setattr(serve, "HANDLERS", fresh)
    return fresh


@pytest.mark.parametrize("text", [COMMAND, RULE.replace("halving", "server_halving"), COMMAND + RULE])
def test_a_server_module_may_register_commands_or_optimizers_or_both(folder, monkeypatch, handlers, text):
    name = f"module_of_test_main_{len(text)}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(registry, "_BY_NAME", {})
    serve.import_server_modules([name, name])
    assert list(handlers) == ([1_900_000_001] if COMMAND in text else [])


def test_a_server_module_that_registers_nothing_is_named_with_what_to_do(folder):
    (folder / "idle_of_test_main.py").write_text("x = 1")
    with pytest.raises(ConfigError, match="the server module idle_of_test_main registers nothing: .*register_command"):
        serve.import_server_modules(["idle_of_test_main"])


def test_a_module_that_both_options_name_is_imported_once(folder, monkeypatch, capsys, handlers):
    (folder / "twice_of_test_main.py").write_text(COMMAND)
    monkeypatch.setenv("KVDIST_SERVER_MODULE", "twice_of_test_main")
    assert main(["--optimizer-module", "twice_of_test_main"]) == EXIT_CONFIG
    assert "DMLC_ROLE says neither" in capsys.readouterr().err, "nothing is wrong with the module"
    assert list(handlers) == [1_900_000_001]


@each("name", ["a/b", "my-rules", "../rules", "rules.", "a b", "3rules"])
@each("by", ["option", "variable"])
def test_what_is_no_name_of_a_module_is_never_imported(name, by, monkeypatch, capsys):
    monkeypatch.setenv("DMLC_ROLE", "server")
    monkeypatch.setenv("KVDIST_OPTIMIZER_MODULE", name if by == "variable" else "")
    assert main(["--optimizer-module", name] if by == "option" else []) == EXIT_CONFIG
    assert f"is {name!r}; it must be names of modules as Python imports them" in capsys.readouterr().err


def test_several_modules_stand_with_commas_between():
    assert read_setting("KVDIST_OPTIMIZER_MODULE", {"KVDIST_OPTIMIZER_MODULE": " a, b.c ,"}) == ("a", "b.c")
    assert read_setting("KVDIST_OPTIMIZER_MODULE", {}) == ()
