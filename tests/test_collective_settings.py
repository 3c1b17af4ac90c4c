"""What the environment sets of a job without servers."""

import pytest

from kvdist.config.collective_settings import CollectiveSettings
from kvdist.config.settings import collective_settings_from_env
from kvdist.errors import ConfigError


def test_nothing_set_gives_the_defaults():
    assert collective_settings_from_env({}) == CollectiveSettings()


@pytest.mark.parametrize(
    ("env", "expected"),
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
def test_a_variable_sets_one_thing(env, expected):
    made = collective_settings_from_env(env)
    assert made == CollectiveSettings(**expected)


@pytest.mark.parametrize(
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
def test_a_value_that_means_nothing_is_refused_by_the_name_of_its_variable(env):
    with pytest.raises(ConfigError, match=next(iter(env))):
        collective_settings_from_env(env)
