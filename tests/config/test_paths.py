"""What stands in a path of a user's for something else, and that every way in expands it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kvdist import Trainer, kv, profiler
from kvdist.__main__ import main
from kvdist.config.environment import cluster_from_env, collective_settings_from_env, read_setting
from kvdist.config.paths import expanded
from kvdist.config.settings import PATH, SETTINGS
from kvdist.errors import ConfigError
from tests.cases import each


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder, and another one that is the present one."""
    there, here = tmp_path / "home", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(there))
    monkeypatch.setenv("RUNS", "runs")
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(here)
    return there


@each(
    "given, expected",
    [
        ("~", "{home}"),
        ("~/run1", "{home}/run1"),
        (Path("~/run1"), "{home}/run1"),
        (b"~/run1", "{home}/run1"),
        ("$HOME/run1", "{home}/run1"),
        ("${HOME}/$RUNS/1", "{home}/runs/1"),
        ("./~/run1", "./~/run1"),
        ("run~1/a$/$", "run~1/a$/$"),
        ("run1", "run1"),
        ("/a/b", "/a/b"),
    ],
)
def test_a_path_is_expanded_as_a_shell_does_it(home, given, expected):
    assert expanded(given) == expected.format(home=home)


def test_a_home_of_nobody_is_refused(home):
    with pytest.raises(ConfigError, match=r"begins with '~no-such-user', but this machine has no home.*'\./~no"):
        expanded("~no-such-user/run1")


@each("name", ["$NOWHERE", "${NOWHERE}"])
@each("given", ["{}/run1", "run/{}", "/run/x-{}.d/1", "~/{}", "$RUNS/{}"])
def test_a_variable_that_is_not_set_is_refused_wherever_it_stands(home, name, given):
    path = given.replace("{}", name)
    with pytest.raises(ConfigError) as refused:
        expanded(path)
    assert f"the path {path!r} contains {name!r}, but no environment variable of that name" in str(refused.value)
    with kv.create("local") as store:
        store.init("w", np.ones(3, np.float32))
        with pytest.raises(ConfigError, match="NOWHERE"):
            store.save_checkpoint(path, 1)
    assert os.listdir() == os.listdir(home) == []


def test_every_setting_that_is_a_path_is_expanded(home):
    kinds = [name for name, row in SETTINGS.items() if row.kind is PATH]
    assert {"KVDIST_SNAPSHOTS", "KVDIST_DUMP", "KVDIST_LEDGER", "KVDIST_PROFILE_DIR", "KVDIST_SECRET_FILE"} <= {*kinds}
    for name in (*kinds, "KVDIST_CHECKPOINT_ROOT", "KVDIST_TIMELINE"):
        assert read_setting(name, {name: "~/x"}) == f"{home}/x"
        with pytest.raises(ConfigError, match=f"{name}: the path"):
            read_setting(name, {name: "~no-such-user/x"})
    cluster = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9091"}
    cluster |= {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "KVDIST_SECRET_FILE": "~/x"}
    assert cluster_from_env(cluster).secret_file == f"{home}/x"
    assert collective_settings_from_env({"HOROVOD_TIMELINE": "~/x"}).timeline == f"{home}/x"
    assert collective_settings_from_env({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""


def test_checkpoints_exports_and_traces_go_to_the_home_folder(home, monkeypatch, capsys):
    monkeypatch.setenv("KVDIST_CHECKPOINT_ROOT", "~")
    with kv.create("dist") as store:
        profiler.set_config(filename="~/trace.json")
        profiler.start()
        store.set_optimizer("adam")
        store.init("w", np.ones(3, np.float32))
        store.push("w", np.ones(3, np.float32))
        assert store.save_checkpoint("~/run", 1).result() == home / "run" / "step-1"
        store.save_optimizer_states("~/states")
        store.load_optimizer_states("~/states")
        assert store.load_checkpoint(Path("~/run")).step == 1
        profiler.dump()
        profiler.set_config()
        trainer = Trainer([torch.nn.Parameter(torch.ones(3))], "adam", kvstore=None)
        trainer.save_states("~/trainer")
        trainer.load_states("~/trainer")
    assert main(["export", "~/run", "~/w.safetensors"]) == 0
    assert main(["checkpoints", "~/run"]) == 0
    assert f"{home}/w.safetensors" in capsys.readouterr().out
    assert {"run", "states", "trainer", "w.safetensors"} < set(os.listdir(home))
    assert any(name.startswith("trace.") for name in os.listdir(home))
    assert os.listdir() == [], "nothing is made here"
