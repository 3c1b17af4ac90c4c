"""The settings of a cluster and of a job without servers: what is read, what is refused, and the round trip."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.config.addresses import local_address_towards
from kvdist.config.endpoints import is_loopback, stays_on_host, tcp_endpoint
from kvdist.config.environment import (
    LAUNCHERS,
    cluster_from_env,
    collective_settings_from_env,
    embedded_cluster_from_env,
    horovod_log_level,
    horovod_without_effect,
    read_setting,
    without_effect,
)
from kvdist.config.settings import (
    SETTINGS,
    TWINS,
    ClusterConfig,
    CollectiveSettings,
    Limits,
    Setting,
    rows_of,
    seconds,
    whole_number,
    with_tables,
)
from kvdist.config.sockets import local_endpoint, port_of_local, scheduler_endpoint
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from tests.cases import each

MXNET = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
}
OURS = {name: MXNET[theirs] for name, theirs in TWINS.items() if theirs in MXNET}


def read(**changes: str) -> ClusterConfig:
    """The configuration of a worker, with changed variables; an empty one counts as not set."""
    config = cluster_from_env({**MXNET, **changes})
    assert config is not None
    return config


def refused(**changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    return str(caught.value)


@each("environ", [MXNET, OURS])
def test_both_families_of_names_describe_the_same_cluster(environ):
    assert cluster_from_env(environ) == ClusterConfig(Role.WORKER, "10.0.0.1", 9091, 2, 3)


def test_our_name_of_a_variable_wins_over_the_old_one():
    assert read(KVDIST_NUM_WORKER="7").num_workers == 7


def test_our_name_does_not_win_when_it_is_empty():
    assert read(KVDIST_NUM_WORKER="").num_workers == 2


@each("environ", [{}, {"DMLC_ROLE": "worker"}, {"HOME": "/", "KVDIST_PLACEMENT": "hash"}])
def test_an_environment_without_a_cluster_describes_none(environ):
    assert cluster_from_env(environ) is None


def test_without_an_argument_the_environment_of_the_process_is_read(monkeypatch):
    for name, value in MXNET.items():
        monkeypatch.setenv(name, value)
    assert cluster_from_env() == read()


@each("missing", MXNET)
def test_half_a_cluster_is_refused_and_what_is_missing_is_named(missing):
    message = refused(**{missing: ""})
    assert "half a cluster" in message
    assert f"{missing} is missing" in message
    assert "kvdist-launch" in message


def test_a_mistyped_role_is_told_before_what_is_missing():
    told = "DMLC_ROLE is 'wroker'; did you mean worker? It must be scheduler, server or worker"
    assert refused(DMLC_ROLE="wroker", DMLC_NUM_WORKER="") == told


@each("role", ["server", "scheduler"])
def test_a_server_without_a_cluster_is_refused_and_everything_missing_is_named(role):
    with pytest.raises(ConfigError, match=r"DMLC_ROLE is set.*DMLC_PS_ROOT_URI.*DMLC_NUM_SERVER are missing"):
        cluster_from_env({"DMLC_ROLE": role})


@each(
    "name, value, message",
    [
        ("DMLC_ROLE", "boss", "DMLC_ROLE is 'boss'; it must be scheduler, server or worker"),
        ("DMLC_NUM_WORKER", "two", "DMLC_NUM_WORKER is 'two'; it must be a whole number"),
        ("DMLC_NUM_WORKER", "0", "DMLC_NUM_WORKER is 0; it must be a whole number, at least 1"),
        ("DMLC_NUM_SERVER", "-1", "DMLC_NUM_SERVER is -1"),
        ("DMLC_PS_ROOT_PORT", "0", "DMLC_PS_ROOT_PORT is 0; it must be a whole number from 1 to 65535"),
        ("DMLC_PS_ROOT_PORT", "65536", "DMLC_PS_ROOT_PORT is 65536"),
        ("KVDIST_RANK", "-1", "KVDIST_RANK is -1; it must be a whole number, at least 0"),
        ("KVDIST_RANK", "2", "KVDIST_RANK is 2, but the cluster has only 2 worker(s)"),
        ("KVDIST_RANK", "x", "KVDIST_RANK is 'x'"),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "0", "MXNET_KVSTORE_BIGARRAY_BOUND is 0"),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "1e6", "MXNET_KVSTORE_BIGARRAY_BOUND is '1e6'"),
        ("KVDIST_SECURITY", "some", "KVDIST_SECURITY is 'some'; it must be one of: none, curve"),
        ("KVDIST_IO_THREADS", "0", "KVDIST_IO_THREADS is 0; it must be a whole number from 1 to 64"),
        ("KVDIST_IO_THREADS", "two", "KVDIST_IO_THREADS is 'two'; it must be a whole number"),
        ("KVDIST_LISTEN_FD", "three", "KVDIST_LISTEN_FD is 'three'; it must be a whole number"),
        ("KVDIST_PORT_RANGE", "20000", "KVDIST_PORT_RANGE is 20000; it must be a range of ports"),
        ("KVDIST_PORT_RANGE", "-5-7", "KVDIST_PORT_RANGE is '-5-7'; it must be a range of ports"),
        ("KVDIST_PORT_RANGE", "200-100", "within 1-65535, the smaller one first"),
        ("KVDIST_PORT_RANGE", "0-100", "within 1-65535"),
        ("KVDIST_PORT_RANGE", "100-65536", "within 1-65535"),
        ("KVDIST_PLACEMENT", "random", "KVDIST_PLACEMENT is 'random'"),
        ("KVDIST_SLICE_BYTES", "4MiB", "KVDIST_SLICE_BYTES is '4MiB'; it must be a whole number"),
        ("KVDIST_SLICE_BYTES", "0", "KVDIST_SLICE_BYTES is 0; it must be a whole number, at least 8"),
        ("KVDIST_PATIENCE_S", "-1", "KVDIST_PATIENCE_S is -1"),
        ("KVDIST_PATIENCE_S", "inf", "KVDIST_PATIENCE_S is 'inf'"),
        ("KVDIST_PATIENCE_S", "nan", "KVDIST_PATIENCE_S is 'nan'"),
        ("KVDIST_PATIENCE_S", "0.9", "KVDIST_PATIENCE_S is 0.9; it must be a number of seconds, from 1 to 1000000"),
        ("KVDIST_SILENCE_S", "60", "KVDIST_SILENCE_S is 60, but this variable was replaced by KVDIST_PATIENCE_S"),
        ("KVDIST_RECONNECT_GRACE_S", "1", "but this variable was replaced by KVDIST_PATIENCE_S"),
        ("KVDIST_HEARTBEAT_S", "1", "KVDIST_HEARTBEAT_S is 1, but this variable was replaced by KVDIST_PATIENCE_S"),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_variable(name, value, message):
    assert message in refused(**{name: value})


@each("role, count", [("worker", 2), ("server", 3), ("scheduler", 1)])
def test_ranks_count_within_the_role(role, count):
    assert read(DMLC_ROLE=role, KVDIST_RANK=str(count - 1)).rank == count - 1
    assert f"has only {count} {role}(s)" in refused(DMLC_ROLE=role, KVDIST_RANK=str(count))


def test_a_role_is_read_whatever_its_case():
    assert read(DMLC_ROLE=" Server ").role is Role.SERVER


@each("launcher", LAUNCHERS[1:])
def test_several_tasks_of_another_launcher_are_refused_when_there_is_no_cluster(launcher):
    size, rank = launcher.size, launcher.rank
    with pytest.raises(ConfigError) as caught:
        cluster_from_env({size: "4", rank: "0"})
    assert str(caught.value).startswith(f"{launcher.name} started 4 tasks ({size}=4)")
    assert "kvdist-launch" in str(caught.value)


@each("size, rank", [(launcher.size, launcher.rank) for launcher in LAUNCHERS[1:]])
def test_a_single_task_or_a_described_cluster_is_no_matter_for_another_launcher(size, rank):
    assert cluster_from_env({size: "1", rank: "0"}) is None
    assert cluster_from_env({size: "4"}) is None
    assert cluster_from_env({**MXNET, size: "4", rank: "0"}) == read()


def test_limits_are_read_by_their_names_with_their_types():
    config = read(KVDIST_SLICE_BYTES="4096", KVDIST_PATIENCE_S="1.5")
    assert config.limits == Limits(slice_bytes=4096, patience_s=1.5)
    assert isinstance(config.limits.slice_bytes, int)


SECURITY = [
    {"security": security, "secret_file": path}
    for security in (None, "none", "curve")
    for path in (None, "/run/secret")
    if (security, path) not in {("none", "/run/secret"), ("curve", None)}
]
HOSTS = st.sampled_from(["127.0.0.1", "::1", "node-7.example"])


@st.composite
def configs(draw: st.DrawFn) -> ClusterConfig:
    role = draw(st.sampled_from(Role))
    workers, servers = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    count = {Role.WORKER: workers, Role.SERVER: servers, Role.SCHEDULER: 1}[role]
    return ClusterConfig(
        role=role,
        root_host=draw(HOSTS),
        root_port=draw(st.integers(1, 65535)),
        num_workers=workers,
        num_servers=servers,
        rank=draw(st.none() | st.integers(0, count - 1)),
        node_host=draw(st.none() | HOSTS),
        job=draw(st.text(min_size=1).filter(lambda text: "\0" not in text)),
        **draw(st.sampled_from(SECURITY)),
        port_range=draw(st.none() | st.tuples(st.integers(1, 300), st.integers(300, 65535))),
        io_threads=draw(st.integers(1, 64)),
        server_devices=tuple(draw(st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:17"]), min_size=1))),
        bigarray_bound=draw(st.integers(1, 1 << 40)),
        placement=draw(st.sampled_from(["bytes", "hash"])),
        supervised=draw(st.booleans()),
        limits=Limits(slice_bytes=draw(st.integers(8, 1 << 26)), patience_s=draw(st.floats(1, 1e6))),
    )


@given(configs())
def test_a_cluster_survives_the_way_through_an_environment(config):
    assert cluster_from_env(config.to_env()) == config


def test_an_environment_never_holds_torchruns_variables():
    names = set(read(KVDIST_RANK="0").to_env())
    assert names.isdisjoint({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})


def test_jobs_of_different_names_have_different_tags_of_32_bits():
    tags = {read(KVDIST_JOB=job).job_tag for job in ("", "a", "b", "ä")}
    assert len(tags) == 4
    assert all(0 <= tag < 1 << 32 for tag in tags)


@each(
    "host, answer",
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False),
     ("0.0.0.0", False), ("node-7", False), ("", False)],
)  # fmt: skip
def test_only_loopback_addresses_are_private(host, answer):
    assert is_loopback(host) is answer


@each(
    "endpoint, answer",
    [("tcp://127.0.0.1:5", True), ("tcp://127.0.0.1:5;shm=a:b", True), ("tcp://[::1]:5", True),
     ("tcp://10.0.0.1:5", False), ("tcp://[fe80::1]:5", False), ("memory://scheduler", False), ("127.0.0.1:5", False)],
)  # fmt: skip
def test_what_goes_to_a_loopback_endpoint_stays_on_the_host(endpoint, answer):
    assert stays_on_host(endpoint) is answer


def test_an_open_address_needs_an_explicit_word():
    sentence = r"10\.0\.0\.1 can be reached from other machines.*KVDIST_SECRET_FILE.*KVDIST_SECURITY=none"
    with pytest.raises(ConfigError, match=sentence):
        read().require_private("10.0.0.1")
    read(KVDIST_SECRET_FILE="/run/secret").require_private("10.0.0.1")
    read(KVDIST_SECURITY="None").require_private("10.0.0.1")
    read().require_private("127.0.0.1")


@each(
    "security, path, encrypts",
    [("", "", False), ("none", "", False), ("", "/run/secret", True), ("Curve", "/run/secret", True)],
)
def test_a_secret_means_encryption(security, path, encrypts):
    assert read(KVDIST_SECURITY=security, KVDIST_SECRET_FILE=path).encrypts is encrypts


@each(
    "security, path, sentence",
    [("none", "/s", "KVDIST_SECURITY is none, but KVDIST_SECRET_FILE is '/s': unset one of them"),
     ("curve", "", "KVDIST_SECURITY is 'curve', but no secret is set: set KVDIST_SECRET_FILE")],
)  # fmt: skip
def test_settings_about_security_that_contradict_each_other_are_refused(security, path, sentence):
    assert sentence in refused(KVDIST_SECURITY=security, KVDIST_SECRET_FILE=path)


@each("settings", [{"KVDIST_SECURITY": "tls"}, {"KVDIST_SECURITY": "none", "KVDIST_SECRET_FILE": "/s"}])
def test_a_process_on_its_own_refuses_what_a_cluster_would(settings):
    with pytest.raises(ConfigError, match="KVDIST_SECURITY is"):
        embedded_cluster_from_env(settings)


def test_the_configuration_knows_where_the_secret_lies_and_not_what_it_is(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"do not show" * 3)
    config = read(KVDIST_SECRET_FILE=str(path))
    assert "do not show" not in f"{config!r}{config.to_env()}"


def test_an_inherited_descriptor_is_not_passed_on():
    config = read(KVDIST_LISTEN_FD="7", DMLC_ROLE="scheduler")
    assert config.listen_fd == 7
    assert "KVDIST_LISTEN_FD" not in config.to_env()


def test_an_ipv6_address_is_written_in_brackets():
    assert tcp_endpoint("::1", 5) == "tcp://[::1]:5"
    assert scheduler_endpoint(read(DMLC_PS_ROOT_URI="::1", KVDIST_SECURITY="none")) == "tcp://[::1]:9091"
    assert tcp_endpoint("node-7", 5) == "tcp://node-7:5"


def test_the_address_towards_this_machine_is_a_loopback_one():
    assert local_address_towards("127.0.0.1", 9) == "127.0.0.1"


def test_a_scheduler_whose_name_does_not_resolve_is_named(monkeypatch):
    def fail(*args: object, **settings: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        ConfigError, match=r"no way from this machine to the scheduler at node-7:9091.*DMLC_PS_ROOT_URI"
    ):
        local_address_towards("node-7", 9091)


def test_an_interface_stands_for_its_address():
    assert read(DMLC_INTERFACE="lo").node_host == "127.0.0.1"
    assert read(DMLC_INTERFACE="127.0.0.0/8").node_host == "127.0.0.1"
    assert read(DMLC_INTERFACE="lo", DMLC_NODE_HOST="10.1.1.1").node_host == "10.1.1.1"


def test_an_interface_that_is_not_there_is_named_among_those_that_are():
    assert "DMLC_INTERFACE is 'nope0', which has no address here; interfaces: " in refused(DMLC_INTERFACE="nope0")


def test_reading_changes_nothing_in_the_environment_of_the_process():
    before = dict(os.environ)
    read(KVDIST_SLICE_BYTES="4096")
    assert dict(os.environ) == before


@each("environ, setting", [({}, "auto"), ({"KVDIST_KERNELS": ""}, "auto")] + [
    ({"KVDIST_KERNELS": word}, word.lower()) for word in ("auto", "numpy", "NUMBA")
])  # fmt: skip
def test_the_kernels_are_chosen_by_one_word(environ, setting):
    assert read_setting("KVDIST_KERNELS", environ) == setting


def test_kernels_that_do_not_exist_are_refused(monkeypatch):
    monkeypatch.setenv("KVDIST_KERNELS", "fortran")
    with pytest.raises(ConfigError, match="KVDIST_KERNELS is 'fortran'; it must be one of: auto, numpy, numba"):
        read_setting("KVDIST_KERNELS")


def test_what_a_host_sums_is_auto_unless_it_is_said_and_survives_a_round_trip():
    assert read().local_reduce == "auto"
    config = read(KVDIST_LOCAL_REDUCE="ON")
    assert config.local_reduce == "on"
    assert cluster_from_env(config.to_env()) == config


def test_another_word_for_what_a_host_sums_is_refused_with_those_that_are_known():
    assert refused(KVDIST_LOCAL_REDUCE="yes") == "KVDIST_LOCAL_REDUCE is 'yes'; it must be one of: auto, on, off"


@each(
    "changes, told",
    [
        ({"KVDIST_REPLICAS": "2"}, "KVDIST_REPLICAS is 2, and only 0 or 1 are possible"),
        ({"KVDIST_REPLICAS": "1"}, "KVDIST_ON_LOSS is 'fail', which ends the job with the first"),
        ({"KVDIST_REPLICAS": "1", "DMLC_NUM_SERVER": "1"}, "on another server, but the job has only 1: start two"),
    ],
)
def test_copies_of_slices_need_a_place_and_a_use(changes, told):
    assert told in refused(**changes)


@each(
    "changes, told",
    [
        ({"KVDIST_REPLICAS": "1"}, "KVDIST_REPLICAS is 1: leave KVDIST_REPLICAS out"),
        ({"KVDIST_SNAPSHOTS": "there"}, "KVDIST_SNAPSHOTS is 'there'"),
        ({"KVDIST_MAX_WORKERS": "9"}, "KVDIST_MAX_WORKERS is 9"),
        ({"KVDIST_MIN_WORKERS": "2"}, "KVDIST_MIN_WORKERS is 2"),
        ({"KVDIST_SCHEDULER_AWAY_S": "5"}, "KVDIST_SCHEDULER_AWAY_S is 5.0"),
        ({"KVDIST_RETURN_S": "0"}, "KVDIST_RETURN_S is 0, so no process would wait"),
    ],
)
def test_where_all_wait_for_lost_workers_nothing_goes_on_without_them(changes, told):
    assert told in refused(KVDIST_ON_LOSS="wait", **changes)


def test_lost_workers_are_waited_for_as_long_as_it_takes_to_start_one_by_hand():
    told = {**MXNET, "KVDIST_ON_LOSS": "wait"}
    assert cluster_from_env(told).loss_policy.return_limit_s == 600.0
    assert cluster_from_env({**told, "KVDIST_RETURN_S": "7"}).loss_policy.return_limit_s == 7.0
    assert cluster_from_env({**told, "KVDIST_ON_LOSS": "continue"}).loss_policy.return_limit_s == 0.0


def test_a_host_cannot_sum_in_shared_memory_that_was_turned_off():
    assert "KVDIST_TRANSPORT is 'tcp'; change one of them" in refused(KVDIST_LOCAL_REDUCE="on", KVDIST_TRANSPORT="tcp")


def test_variables_of_horovod_mean_something_or_are_told():
    assert collective_settings_from_env({"HOROVOD_GLOO_IFACE": "eth7"}).interface == "eth7"
    assert collective_settings_from_env({"HOROVOD_GLOO_IFACE": "eth7", "DMLC_INTERFACE": "eth1"}).interface == "eth1"
    assert horovod_log_level({}) is None and horovod_log_level({"HOROVOD_LOG_LEVEL": "TRACE"}) == "DEBUG"
    with pytest.raises(ConfigError, match="HOROVOD_LOG_LEVEL is 'loud'; it must be one of: trace, debug, info"):
        horovod_log_level({"HOROVOD_LOG_LEVEL": "loud"})
    assert horovod_without_effect({"HOROVOD_AUTOTUNE": "0", "HOROVOD_TIMELINE": "t"}) == []
    told = horovod_without_effect({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": "1048576"})
    assert [sentence.split(":")[0] for sentence in told] == [
        "HOROVOD_FUSION_THRESHOLD has no effect",
        "HOROVOD_CYCLE_TIME has no effect",
    ]


def test_variables_that_ask_horovod_for_gloo_ask_for_nothing_else_here():
    controllers = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "GLOO"}
    assert horovod_without_effect(controllers) == []
    told = horovod_without_effect(dict.fromkeys(controllers, "mpi"))
    assert [sentence.split(" has no effect: ")[0] for sentence in told] == list(controllers)


def test_a_variable_that_changes_nothing_is_told_with_what_there_is_instead():
    assert without_effect({"PATH": "/bin", "MXNET_KVSTORE_BIGARRAY_BOUND": "5", "PS_RESEND": ""}) == []
    (sentence,) = without_effect({"PS_RESEND": "1", "DMLC_PS_VAN_TYPE": "P3"})
    assert sentence == "PS_RESEND has no effect: a lost message is always sent again"
    told = without_effect({"PS_VERBOSE": "2", "DMLC_RANK": "1", "MXNET_KVSTORE_SERIAL_PUSH": "1"})
    assert [sentence.split(" has no effect: ")[0] for sentence in told] == [
        "PS_VERBOSE",
        "DMLC_RANK",
        "MXNET_KVSTORE_SERIAL_PUSH",
    ]
    (sentence,) = without_effect({"DMLC_PS_VAN_TYPE": "ibverbs"})
    assert sentence.startswith("DMLC_PS_VAN_TYPE has no effect: except for p3; ")


@each(
    "environ, expected",
    [
        ({}, False),
        ({"DMLC_PS_VAN_TYPE": "zmq"}, False),
        ({"DMLC_PS_VAN_TYPE": "p3"}, True),
        ({"DMLC_PS_VAN_TYPE": "P3", "KVDIST_PRIORITY_SLICES": ""}, True),
        ({"DMLC_PS_VAN_TYPE": "p3", "KVDIST_PRIORITY_SLICES": "0"}, False),
        ({"KVDIST_PRIORITY_SLICES": "1"}, True),
    ],
)
def test_priority_slices_are_asked_for_by_either_name(environ, expected):
    assert read_setting("KVDIST_PRIORITY_SLICES", environ) is expected


def test_another_word_for_priority_slices_is_refused():
    with pytest.raises(ConfigError, match="KVDIST_PRIORITY_SLICES is 'yes'; it must be 0 or 1"):
        read_setting("KVDIST_PRIORITY_SLICES", {"KVDIST_PRIORITY_SLICES": "yes"})


def test_the_size_of_priority_slices_is_read_in_elements_or_in_bytes_and_survives_a_round_trip():
    assert read().limits.priority_slice_bytes == 4 * 40_000
    config = read(MXNET_KVSTORE_SLICE_THRESHOLD="1001")
    assert config.limits.priority_slice_bytes == 4004
    assert cluster_from_env(config.to_env()) == config
    both = read(MXNET_KVSTORE_SLICE_THRESHOLD="1001", KVDIST_PRIORITY_SLICE_BYTES="512")
    assert both.limits.priority_slice_bytes == 512


@each(
    "name, value, message",
    [
        (
            "MXNET_KVSTORE_SLICE_THRESHOLD",
            "1",
            "MXNET_KVSTORE_SLICE_THRESHOLD is 1; it must be a whole number, at least 2",
        ),
        ("MXNET_KVSTORE_SLICE_THRESHOLD", "4e4", "MXNET_KVSTORE_SLICE_THRESHOLD is '4e4'; it must be a whole number"),
        ("KVDIST_PRIORITY_SLICE_BYTES", "7", "KVDIST_PRIORITY_SLICE_BYTES is 7; it must be a whole number, at least 8"),
        (
            "KVDIST_PRIORITY_WINDOW_BYTES",
            "0",
            "KVDIST_PRIORITY_WINDOW_BYTES is 0; it must be a whole number, at least 1",
        ),
    ],
)
def test_priority_slices_of_no_size_are_refused(name, value, message):
    assert message in refused(**{name: value})


@each("setting, expected", [(None, True), ("", True), ("1", True), ("0", False)])
def test_who_updates_by_default_is_read_by_either_name(setting, expected):
    env = {} if setting is None else {"MXNET_UPDATE_ON_KVSTORE": setting}
    assert read_setting("KVDIST_UPDATE_ON_KVSTORE", env) is expected
    assert read_setting("KVDIST_UPDATE_ON_KVSTORE", {**env, "KVDIST_UPDATE_ON_KVSTORE": "0"}) is False


def test_another_word_for_who_updates_is_refused():
    with pytest.raises(ConfigError, match="MXNET_UPDATE_ON_KVSTORE is 'yes'; it must be 0 or 1"):
        read_setting("KVDIST_UPDATE_ON_KVSTORE", {"MXNET_UPDATE_ON_KVSTORE": "yes"})


# Where servers compute.


@each(
    "text, devices",
    [
        ("", ("cpu",)),
        ("cpu", ("cpu",)),
        ("cuda:0", ("cuda:0",)),
        (" CUDA:1 , cpu,cuda:12", ("cuda:1", "cpu", "cuda:12")),
    ],
)
def test_the_devices_of_servers_are_read_and_passed_on(text, devices):
    config = read(KVDIST_SERVER_DEVICE=text, KVDIST_RANK="0")
    assert config.server_devices == devices
    assert config.to_env().get("KVDIST_SERVER_DEVICE", "cpu") == ",".join(devices)
    assert embedded_cluster_from_env({"KVDIST_SERVER_DEVICE": text}).server_devices == devices


def test_servers_take_the_devices_in_turn_by_their_ranks():
    config = read(KVDIST_SERVER_DEVICE="cuda:0,cuda:1,cpu")
    assert [config.server_device(rank) for rank in range(5)] == ["cuda:0", "cuda:1", "cpu", "cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="'cuda:0,cuda:1,cpu', which servers take in turn.*set KVDIST_RANK"):
        config.server_device(None)
    assert read(KVDIST_SERVER_DEVICE="cuda:3").server_device(None) == "cuda:3"
    assert read(KVDIST_SERVER_DEVICE="cuda:3,cuda:3").server_device(None) == "cuda:3"
    assert read().server_device(None) == read().server_device(7) == "cpu"


@each("text", ["cuda", "gpu:0", "cuda:", "cuda:-1", "cuda:0,", "0", "cuda:0;cuda:1", "cuda:1234"])
def test_what_is_no_device_is_named(text):
    message = refused(KVDIST_SERVER_DEVICE=text)
    assert message.startswith(f"KVDIST_SERVER_DEVICE is {text if text == '0' else repr(text)}; it must be cpu, cuda:0")


@each("address", ["127.0.0.1", "::1", "localhost"])
def test_a_cluster_on_loopback_addresses_meets_at_a_file_of_its_user_unless_it_asks_for_tcp(address):
    config = read(DMLC_PS_ROOT_URI=address)
    assert config.is_local and scheduler_endpoint(config) == local_endpoint(9091)
    assert port_of_local(scheduler_endpoint(config)) == 9091
    for tcp in ({"KVDIST_SECURITY": "none"}, {"KVDIST_SECRET_FILE": "/s"}, {"DMLC_PS_ROOT_URI": "10.0.0.1"}):
        assert scheduler_endpoint(read(**{"DMLC_PS_ROOT_URI": address, **tcp})).startswith("tcp://")


def test_tcp_without_a_word_about_security_is_refused():
    here = {"DMLC_PS_ROOT_URI": "127.0.0.1", "KVDIST_TRANSPORT": "tcp"}
    assert "set KVDIST_SECRET_FILE" in refused(**here)
    assert read(**here, KVDIST_SECURITY="none").transport == "tcp"


def test_a_stall_may_last_for_ever_and_is_explained_before_it_ends_the_job():
    assert embedded_cluster_from_env({"KVDIST_STALL_SHUTDOWN_S": "0"}).limits.stall_shutdown_s == 0
    limits = embedded_cluster_from_env({"KVDIST_STALL_SHUTDOWN_S": "3"}).limits
    assert (limits.stall_shutdown_s, limits.explain_after_s) == (3, 1.5)
    assert embedded_cluster_from_env({"KVDIST_STALL_SHUTDOWN_S": "600"}).limits.explain_after_s == 10
    with pytest.raises(ConfigError, match="KVDIST_STALL_SHUTDOWN_S is -1"):
        embedded_cluster_from_env({"KVDIST_STALL_SHUTDOWN_S": "-1"})


# The table.


def test_every_default_is_in_its_bounds_and_survives_a_way_through_its_text():
    for row in SETTINGS.values():
        if row.default is not None:
            assert row.parse(row.kind.text(row.default)) == row.default, row.variable


def test_every_setting_of_a_process_has_one_row_and_says_what_it_means():
    for row in SETTINGS.values():
        assert row.variable.startswith("KVDIST_") and row.sentence and not row.sentence.endswith(".")
    assert {row.variable for view in (ClusterConfig, CollectiveSettings, Limits) for row in rows_of(view).values()}


@each(
    "env, expected",
    [
        ({"KVDIST_X": "3", "MXNET_X": "4", "X": "5"}, 3),
        ({"KVDIST_X": "", "MXNET_X": "4", "X": "5"}, 4),
        ({"X": "5"}, 10),
        ({}, 7),
    ],
)
def test_our_name_wins_over_the_twin_and_that_over_a_variable_of_another_form(env, expected):
    row = Setting("KVDIST_X", whole_number(0), 7, "", twin="MXNET_X", derived=("X", lambda text: str(2 * int(text))))
    assert row.read(env) == expected


def test_an_error_names_the_variable_that_was_set_with_what_is_expected():
    row = Setting("KVDIST_X", seconds(0, positive=True), 1.0, "", twin="MXNET_X")
    for name in ("KVDIST_X", "MXNET_X"):
        with pytest.raises(ConfigError, match=f"^{name} is 0; it must be a number of seconds, above 0$"):
            row.read({name: "0"})


def test_the_tables_of_the_documentation_are_those_of_the_settings():
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
    assert with_tables(text) == text, "python -m kvdist config --update docs/configuration.md writes them"
    assert all(f"| `{row.name}` |" in text for row in SETTINGS.values())


def test_a_table_takes_the_place_of_an_older_one():
    head, tail = "before\n<!-- settings: Without servers -->\n", "<!-- end of settings -->\nafter\n"
    written = with_tables(head + "| old |\n" + tail)
    assert written.startswith(head + "| variable | twin | default | meaning |\n") and written.endswith(tail)
    assert "| `KVDIST_START_TIMEOUT_S` | `HOROVOD_START_TIMEOUT` | `30.0` | " in written and "| old |" not in written


# What follows from the patience.


@each(
    "patience_s, heartbeat_s, quiet_s, silence_s, graces_s",
    [(1, 0.125, 0.25, 0.75, (0.4, 1.025)), (4, 0.5, 1, 3, (0.4, 2.9)), (3600, 1, 2, 2700, (0.4, 2250.4))],
)
def test_what_follows_from_the_patience(patience_s, heartbeat_s, quiet_s, silence_s, graces_s):
    limits = Limits(patience_s=patience_s)
    assert (limits.heartbeat_s, limits.quiet_s, limits.silence_s) == (heartbeat_s, quiet_s, silence_s)
    assert (limits.reconnect_grace_s(False), limits.reconnect_grace_s(True)) == pytest.approx(graces_s)


@each("patience_s", [1, 1.5, 2, 4, 10, 30, 60, 3600, 1e6])
def test_who_is_back_within_the_patience_has_the_time_to_dial(patience_s):
    """The last word came a heartbeat before the network went; when it is back, a dial has just begun in vain."""
    limits = Limits(patience_s=patience_s)
    back_s = limits.heartbeat_s + limits.patience_s + limits.dial_s + limits.redial_s
    assert back_s < limits.silence_s + limits.reconnect_grace_s(after_silence=True) <= 1.375 * limits.patience_s + 0.4


@each("patience_s", [1, 2, 10, 60])
def test_where_the_others_go_on_a_silent_process_is_given_up_within_a_second_after_the_patience(patience_s):
    limits = Limits(patience_s=patience_s)
    lost_s = limits.silence_s + limits.reconnect_grace_s(after_silence=True, goes_on=True)
    assert limits.patience_s < lost_s <= limits.patience_s + 0.9 < patience_s + 1.0
    assert limits.reconnect_grace_s(after_silence=False, goes_on=True) == limits.reconnect_grace_s(after_silence=False)


@each("patience_s", [1, 1.5, 2, 4, 10, 30, 60, 3600])
def test_where_the_others_go_on_who_is_back_within_four_fifths_of_the_patience_has_the_time_to_dial(patience_s):
    limits = Limits(patience_s=patience_s)
    back_s = limits.heartbeat_s + 0.8 * patience_s + limits.dial_s + limits.redial_s
    assert back_s <= limits.silence_s + limits.reconnect_grace_s(after_silence=True, goes_on=True)


# Jobs without servers.


def test_no_variable_gives_the_defaults():
    assert collective_settings_from_env({}) == CollectiveSettings()


@each(
    "env, expected",
    [
        ({"KVDIST_STALL_CHECK_S": "2.5"}, {"stall_check_s": 2.5}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "60"}, {"stall_check_s": 60.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"stall_check_s": 0.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "KVDIST_STALL_CHECK_S": "5"}, {"stall_check_s": 5.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90", "KVDIST_STALL_SHUTDOWN_S": "9"}, {"stall_shutdown_s": 9.0}),
        ({"HOROVOD_START_TIMEOUT": "45"}, {"start_timeout_s": 45.0}),
        ({"HOROVOD_TIMELINE": "/tmp/t.json"}, {"timeline": "/tmp/t.json"}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {"timeline": ""}),
        ({"KVDIST_TIMELINE": "a.json", "HOROVOD_TIMELINE": "b.json"}, {"timeline": "a.json"}),
        ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, {"timeline_marks_cycles": True}),
        ({"KVDIST_SECURITY": "None"}, {"security": "none"}),
        ({"KVDIST_PORT_RANGE": "20000-20010"}, {"port_range": (20000, 20010)}),
        ({"DMLC_INTERFACE": "eth1"}, {"interface": "eth1"}),
    ],
)
def test_a_variable_sets_one_setting_of_a_job_without_servers(env, expected):
    made = collective_settings_from_env(env)
    assert made == CollectiveSettings(**expected)


@each(
    "env",
    [
        {"KVDIST_STALL_CHECK_S": "soon"},
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "-1"},
        {"KVDIST_STALL_SHUTDOWN_S": "inf"},
        {"KVDIST_START_TIMEOUT_S": "0"},
        {"HOROVOD_STALL_CHECK_DISABLE": "maybe"},
        {"KVDIST_SECURITY": "tls"},
    ],
)
def test_a_setting_of_a_job_without_servers_is_refused_by_the_name_of_its_variable(env):
    with pytest.raises(ConfigError, match=next(iter(env))):
        collective_settings_from_env(env)
