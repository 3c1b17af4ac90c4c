"""`kv.create` and `kv.register`: every name leads to its store, and every other name to a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist import ConfigError, KVStore, kv, quota
from kvdist.config.foreign import FOREIGN_NAMES
from kvdist.kvstore import DIST_NAMES, LOCAL_NAMES, dist, local
from kvdist.runtime.cluster import PROCESS_CLUSTER
from tests.cases import each

SYNC_NAMES = ["dist", "dist_sync", "dist_device_sync", "dist_sync_device", "p3", "p3store_dist"]
ASYNC_NAMES = ["dist_async", "dist_async_device", "dist_device_async"]


@pytest.fixture(autouse=True)
def what_was_registered_is_forgotten(monkeypatch):
    monkeypatch.setattr("kvdist.kvstore.registry.REGISTERED", {})


@each("name", LOCAL_NAMES)
def test_the_names_of_local_stores(name):
    with kv.create(name) as store:
        assert type(store._backend) is local.LocalBackend and store.type == name


@each("name", [*SYNC_NAMES, *ASYNC_NAMES])
def test_the_names_of_stores_on_a_cluster(name):
    with kv.create(name) as store:
        assert type(store._backend) is dist.DistBackend and store.type == name


def test_the_mode_of_a_store_is_that_of_its_name():
    assert {name for name, policy in DIST_NAMES.items() if policy.is_lockstep} == set(SYNC_NAMES)
    assert {name for name, policy in DIST_NAMES.items() if not policy.is_lockstep} == set(ASYNC_NAMES)
    assert {name for name, policy in DIST_NAMES.items() if policy.by_priority} == {"p3", "p3store_dist"}


def test_local_is_the_default_and_upper_case_is_the_same():
    assert kv.create().type == "local"
    assert kv.create("Local_Allreduce_Device").type == "local_allreduce_device"


@each(
    "name, advice",
    [
        ("TestStore", "register a class of your own called TestStore"),
        ("dist_device", "use 'dist_device_sync' or 'dist_device_async'"),
        ("dist_sync_async", "use 'dist_sync' or 'dist_async'"),
    ],
)
def test_a_name_that_people_try_is_refused_with_what_to_use(name, advice):
    with pytest.raises(ValueError, match=f"there is no store called {name!r}: .*{advice}.*; (Known|known) are: "):
        kv.create(name)


def test_a_registered_class_comes_before_advice():
    @kv.register
    class TestStore:
        """Somebody's own."""

    assert type(kv.create("teststore")) is TestStore


def test_nccl_says_what_it_is_in_a_process_that_is_alone(caplog):
    assert kv.create("nccl").type == "nccl"
    assert "'nccl') in a process that is alone: the store is what 'device' gives" in caplog.text


@each(
    "name, setting, value",
    [
        ("hybrid", "KVDIST_ON_LOSS", "continue"),
        ("hybrid", "KVDIST_KERNELS", "none such"),
        ("hybrid", "WORLD_SIZE", "2"),  # half of what says which rank this process is
        ("dist", "KVDIST_KERNELS", "none such"),
    ],
)
def test_a_store_that_is_refused_leaves_no_cluster_behind(monkeypatch, name, setting, value):
    pytest.importorskip("torch")
    monkeypatch.setenv(setting, value)
    with pytest.raises(ConfigError, match=setting):
        kv.create(name)
    assert PROCESS_CLUSTER.present is None


@each("name", ["collective", "hybrid"])
def test_a_job_that_encrypts_has_no_stores_that_sum_among_workers_and_nobody_asks_its_scheduler(
    monkeypatch, tmp_path, name
):
    pytest.importorskip("torch")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    job = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "1"}
    for variable, value in {**job, "DMLC_NUM_SERVER": "1", "KVDIST_SECRET_FILE": str(secret)}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="this job is encrypted, but collective operations"):
        kv.create(name)
    assert PROCESS_CLUSTER.present is None


@each("name", ["", "dst", "dist_sync_async", "my_dist", "distributed", "local2", " dist"])
def test_an_unknown_name_is_a_value_error_that_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="there is no store called") as caught:
        kv.create(name)
    message = str(caught.value)
    assert repr(name) in message
    assert all(known in message for known in [*LOCAL_NAMES, *SYNC_NAMES, *ASYNC_NAMES])


@each("name, near", [("dst", "dist"), ("Dist_Asinc", "dist_async or dist_sync"), ("sync", "dist_sync or dist_async")])
def test_an_unknown_name_that_is_like_a_known_one_is_refused_with_that(name, near):
    with pytest.raises(ValueError, match=rf"; did you mean {near}\? Known are: local"):
        kv.create(name)


@each("name", [None, 3, b"dist"])
def test_a_name_that_is_no_string_is_a_type_error(name):
    with pytest.raises(TypeError, match="the name of a store is a string, not "):
        kv.create(name)


def test_a_registered_class_is_created_by_its_name_and_listed():
    @kv.register
    class TestStore:
        """Somebody's own."""

    assert type(kv.create("teststore")) is TestStore
    assert type(kv.create("TestStore")) is TestStore
    with pytest.raises(ValueError, match="teststore"):
        kv.create("nosuch")


def test_a_registered_class_takes_the_place_of_a_name_with_a_warning():
    with pytest.warns(UserWarning, match="the store 'local' is now .*Local"):

        @kv.register
        class Local:
            """Somebody's own."""

    assert type(kv.create("local")) is Local


def test_a_cluster_that_is_half_described_is_an_error(monkeypatch):
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "9091")
    with pytest.raises(ConfigError, match="half a cluster: DMLC_PS_ROOT_PORT is set, DMLC_ROLE, "):
        kv.create("dist")
    assert kv.create("local").rank == 0  # needs no cluster


def test_the_first_worker_names_variables_that_change_nothing(monkeypatch, caplog):
    monkeypatch.setenv("DMLC_PS_VAN_TYPE", "ibverbs")
    with kv.create("dist"):
        pass
    told = [record.message for record in caplog.records if "has no effect" in record.message]
    assert told == [f"DMLC_PS_VAN_TYPE has no effect: {FOREIGN_NAMES['DMLC_PS_VAN_TYPE'].why}"]


@pytest.mark.parametrize("name", ["p3", "p3store_dist", "dist", "dist_async"])
def test_a_store_has_priority_slices_by_its_name_or_by_the_environment(monkeypatch, name):
    if not name.startswith("p3"):
        monkeypatch.setenv("DMLC_PS_VAN_TYPE", "p3")
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "100")
    with kv.create(name) as store:
        store.set_optimizer("test")
        store.init("w", np.zeros(1001, np.float32))
        assert len(store._backend.keys["w"].slices) == 11
        store.push("w", np.arange(1001, dtype=np.float32))
        assert (store.pull("w") == np.arange(1001)).all()


def test_a_store_without_priority_slices_is_cut_as_ever(monkeypatch):
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "100")
    with kv.create("dist") as store:
        store.init("w", np.zeros(1001, np.float32))
        assert len(store._backend.keys["w"].slices) == 1


@each(
    "environment, given, expected",
    [
        ("sync", None, None),
        (None, "sync", None),
        ("quota:64", "sync", None),
        ("quota:64", None, quota(64)),
        ("sync", "quota:64", quota(64)),
        ("local_sgd:3", quota(64), quota(64)),
    ],
)
def test_a_policy_is_the_scripts_else_the_environments_and_sync_is_none(monkeypatch, environment, given, expected):
    if environment is not None:
        monkeypatch.setenv("KVDIST_POLICY", environment)
    with kv.create("dist", policy=given) as store:
        assert store._backend.policy == expected


@each("name", [*ASYNC_NAMES, "local", "collective"])
def test_sync_goes_with_every_store_as_it_is_no_policy(name):
    kv.create(name, policy="sync").close()


@each("name", ["local", "device", "collective"])
def test_a_policy_of_the_job_is_for_its_stores_on_servers_and_one_of_a_call_for_that_store(monkeypatch, name):
    monkeypatch.setenv("KVDIST_POLICY", "local_sgd:3")
    with kv.create(name) as store:
        assert store._backend.policy is None
    with pytest.raises(ConfigError, match=rf"policy is quota:64, which is for synchronous stores .* not '{name}'"):
        kv.create(name, policy="quota:64")


@each("text", ["sync:5", "sync,exact", "in_sync", ""])
def test_what_is_no_policy_is_refused_with_those_there_are(monkeypatch, text):
    with pytest.raises(ValueError, match=f"there is no policy {text!r}: write sync, local_sgd:STEPS"):
        kv.create("dist", policy=text)
    monkeypatch.setenv("KVDIST_POLICY", text or "?")
    with pytest.raises(ConfigError, match=r"KVDIST_POLICY: there is no policy '.*': write sync, local_sgd:STEPS"):
        kv.create("dist")


@each(
    "text, message",
    [
        ("quota", "the policy 'quota' lacks its number of SAMPLES: write quota:512"),
        ("quota:512,localsteps", ".*has an unknown word 'localsteps': did you mean local_steps"),
        ("quta:3", r"there is no policy 'quta:3': did you mean quota:SAMPLES\["),
        ("ssp:4", "the policy 'ssp' was removed: write async, or to drop late gradients async:MAX_DELAY, "),
        ("backup:1", "the policy 'backup' was removed: write quota:SAMPLES, "),
        ("buffered:4,local_steps", "the policy 'buffered' was removed: write async:sqrt, .* or quota:SAMPLES, "),
        ("bufered:3", "there is no policy 'bufered:3': write sync, (?!.*(buffered|backup|ssp):)"),
    ],
)
def test_a_policy_that_is_nearly_right_is_answered_with_what_is_missing(monkeypatch, text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kv.create("dist", policy=text)
    monkeypatch.setenv("KVDIST_POLICY", text)
    with pytest.raises(ConfigError, match=f"^KVDIST_POLICY: {message}"):
        kv.create("dist")
    with pytest.raises(ValueError, match="a quota of '512' examples"):
        quota("512")


def test_a_server_does_not_create_stores(monkeypatch):
    for name, value in (("ROLE", "server"), ("PS_ROOT_URI", "127.0.0.1"), ("PS_ROOT_PORT", "9091")):
        monkeypatch.setenv(f"DMLC_{name}", value)
    monkeypatch.setenv("DMLC_NUM_WORKER", "1")
    monkeypatch.setenv("DMLC_NUM_SERVER", "1")
    with pytest.raises(ConfigError, match="DMLC_ROLE is server, but only workers create stores"):
        kv.create("dist")


def test_a_store_is_a_context_that_closes_it():
    with kv.create("dist") as store:
        store.init("w", np.ones(3))
    with pytest.raises(RuntimeError, match="has been closed"):
        store.pull("w")
    assert isinstance(store, KVStore)
