"""The environment of a process: layers over a host's own, what is forwarded, and what users set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.errors import ConfigError
from kvdist_launch.environment import (
    OTHER_NAME,
    OWNED_VARIABLES,
    SECURITY_VARIABLES,
    Environment,
    forwarded,
    interpreter_front,
    parse_assignments,
    parse_env_file,
    parse_exports,
    read_env_file,
    redacted,
)
from tests.cases import each

ANY_NAME = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in OWNED_VARIABLES)
NAMES = ANY_NAME | st.sampled_from(["PATH", "PYTHONPATH", "DMLC_INTERFACE", "KVDIST_INTERFACE"])
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=8)
VARIABLES = st.dictionaries(NAMES, VALUES, max_size=5)


@given(VARIABLES, VARIABLES, VARIABLES, VARIABLES)
def test_settings_win_defaults_yield_and_everything_else_stays(base, defaults, front, settings):
    result = Environment(defaults, front, settings).over(base)
    assert {name: result[name] for name in settings} == settings
    for name, value in base.items():
        if name not in settings and name not in front and OTHER_NAME.get(name) not in settings:
            assert result[name] == value
    for name, value in front.items():
        if name not in settings and OTHER_NAME.get(name) not in settings:
            assert result[name].startswith(value)
            assert result[name].endswith(base.get(name, ""))
    assert set(result) <= {*base, *defaults, *front, *settings}


@given(VARIABLES, VARIABLES, VARIABLES, VARIABLES)
def test_applying_an_environment_twice_is_applying_it_once(base, defaults, front, settings):
    environment = Environment(defaults, front, settings)
    assert environment.over(environment.over(base)) == environment.over(base)


@each(
    "base, expected",
    [
        ({}, "/venv/bin:/bin:/usr/bin"),
        ({"PATH": ""}, "/venv/bin:/bin:/usr/bin"),
        ({"PATH": "/usr/bin"}, "/venv/bin:/usr/bin"),
        ({"PATH": "/venv/bin:/usr/bin"}, "/venv/bin:/usr/bin"),
        ({"PATH": "/venv/bin"}, "/venv/bin"),
        ({"PATH": "/venv/binary:/usr/bin"}, "/venv/bin:/venv/binary:/usr/bin"),
        ({"PATH": "/usr/bin:/venv/bin"}, "/venv/bin:/usr/bin:/venv/bin"),
    ],
)
def test_a_front_goes_before_what_the_host_has(base, expected):
    assert Environment(front={"PATH": "/venv/bin"}).over(base)["PATH"] == expected


def test_a_front_adds_no_empty_part_to_a_search_path():
    assert Environment(front={"PYTHONPATH": "/lib"}).over({})["PYTHONPATH"] == "/lib"
    assert Environment(front={"PYTHONPATH": ""}).over({"PYTHONPATH": "/lib"})["PYTHONPATH"] == "/lib"


def test_variables_of_an_earlier_job_are_dropped():
    base = dict.fromkeys(OWNED_VARIABLES, "1") | {"HOME": "/h"}
    assert Environment().over(base) == {"HOME": "/h"}


def test_a_setting_replaces_a_variables_other_name_and_a_default_yields_to_it():
    base = {"DMLC_INTERFACE": "eth0"}
    assert Environment(settings={"KVDIST_INTERFACE": "eth1"}).over(base) == {"KVDIST_INTERFACE": "eth1"}
    assert Environment(defaults={"KVDIST_INTERFACE": "eth1"}).over(base) == base


def test_what_concerns_training_is_forwarded_and_the_rest_is_not():
    sent = {
        "CUDA_HOME": "/c", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "MKL_X": "1", "KVDIST_PLACEMENT": "hash",
        "MXNET_Y": "2", "DMLC_INTERFACE": "eth0", "PS_VERBOSE": "1", "TORCH_HOME": "/t", "PYTORCH_ALLOC": "x",
        "HF_HOME": "/hf", "LANG": "C.UTF-8", "LC_ALL": "C",
    }  # fmt: skip
    kept = {
        "HOME": "/home/me", "PATH": "/usr/bin", "SSH_AUTH_SOCK": "/s", "RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "DMLC_ROLE": "worker",
        "KVDIST_RANK": "3", "KVDIST_SECRET_FILE": "/run/s", "DMLC_NODE_HOST": "10.0.0.1", "MXNET BAD": "x",
        "AWS_SECRET_ACCESS_KEY": "a",
    }  # fmt: skip
    environment, left_out = forwarded({**sent, **kept, "PYTHONPATH": "/lib", "LD_LIBRARY_PATH": "/cuda"})
    assert environment.settings == sent
    assert environment.front == {"PYTHONPATH": "/lib", "LD_LIBRARY_PATH": "/cuda"}
    assert left_out == []


@each("name", ["MXNET_API_TOKEN", "KVDIST_X_SECRET", "CUDA_KEY", "DMLC_PASSWORD", "PS_credentials"])
def test_what_looks_secret_is_left_out_and_told(name):
    environment, left_out = forwarded({name: "x", "MXNET_A": "1"})
    assert environment.settings == {"MXNET_A": "1"}
    assert left_out == [name]


def test_values_that_look_secret_are_hidden():
    assert redacted({"AWS_SECRET_ACCESS_KEY": "s", "A": "b"}) == {"AWS_SECRET_ACCESS_KEY": "(hidden)", "A": "b"}


@each(
    "python, front", [("/venv/bin/python", {"PATH": "/venv/bin"}), ("/usr/bin/python3", {}), ("python3", {}), ("", {})]
)
def test_the_folder_of_an_interpreter_goes_first_unless_it_is_the_systems(python, front):
    assert interpreter_front(python) == front


@each(
    "text, name, value",
    [
        ("A=b", "A", "b"),
        ("A:b", "A", "b"),
        ("A=", "A", ""),
        ("A=b=c:d", "A", "b=c:d"),
        ("URL:http://h/?a=b", "URL", "http://h/?a=b"),
        ("_A1=line\nline", "_A1", "line\nline"),
        ("A=$(touch pwned);`id`'\"", "A", "$(touch pwned);`id`'\""),
    ],
)
def test_the_first_separator_after_the_name_decides(text, name, value):
    assert parse_assignments([text]) == {name: value}


@each("text", ["A", "", "=b", "1A=b", "A-B=c", "A B=c", "Ä=b", "A;id=b", "A\n=b"])
def test_a_text_that_sets_no_variable_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        parse_assignments([text])


@each("name", sorted(OWNED_VARIABLES - set(SECURITY_VARIABLES)))
def test_variables_that_the_launcher_sets_cannot_be_given_in_any_way(name):
    for refused in (
        lambda: parse_assignments([f"{name}=1"]),
        lambda: parse_exports([name], {name: "1"}),
        lambda: parse_exports([f"{name}=1"], {}),
        lambda: parse_env_file(f"{name}=1", "file"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is set by the launcher"):
            refused()


def test_a_zero_byte_is_refused():
    for refused in (
        lambda: parse_assignments(["A=b\0c"]),
        lambda: parse_exports(["A=b\0c"], {}),
        lambda: parse_env_file("A=b\0c", "file"),
    ):
        with pytest.raises(ConfigError, match="the value of A contains a zero byte"):
            refused()


def test_an_export_takes_a_variable_as_it_is_here_or_sets_it():
    assert parse_exports(["A", "B=x=y", "C="], {"A": "a\nb"}) == {"A": "a\nb", "B": "x=y", "C": ""}


@each(
    "text, message",
    [
        ("ABSENT", "this variable is not set; set it, or write -x ABSENT=VALUE"),
        ("A-B", "is not the name of a variable"),
        ("=x", "is not the name of a variable"),
        ("$(id)", "is not the name of a variable"),
    ],
)
def test_an_export_of_what_is_not_there_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_exports([text], {"A": "a"})


def test_a_file_of_variables_is_read_as_docker_compose_reads_it():
    text = r"""
# a comment
PLAIN=value with blanks   # and a comment
HASH=a#b
EMPTY=
ONLY_COMMENT= # nothing
  INDENTED = x
export EXPORTED=y
SINGLE='$HOME "and" \n # kept'
DOUBLE="line\nline \"quoted\" \\ \$HOME # kept"  # comment
URL=http://h/?a=b
NOT_EXPANDED=$HOME
"""
    assert parse_env_file(text, "file") == {
        "PLAIN": "value with blanks",
        "HASH": "a#b",
        "EMPTY": "",
        "ONLY_COMMENT": "",
        "INDENTED": "x",
        "EXPORTED": "y",
        "SINGLE": r"""$HOME "and" \n # kept""",
        "DOUBLE": 'line\nline "quoted" \\ $HOME # kept',
        "URL": "http://h/?a=b",
        "NOT_EXPANDED": "$HOME",
    }


@each(
    "line, message",
    [
        ("NOTHING", "not an assignment"),
        ("A='b", "quotes do not"),
        ('A="b" c', "quotes do not"),
        ("1=b", "not an assignment"),
    ],
)
def test_a_wrong_line_of_a_file_is_named_and_not_repeated(line, message):
    with pytest.raises(ConfigError, match=rf"^--env-file my.env, line 3: .*{message}") as caught:
        parse_env_file(f"\nOK=1\n{line}\n", "my.env")
    assert line not in str(caught.value)


def test_a_file_of_variables_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--env-file .*absent cannot be read: No such file"):
        read_env_file(str(tmp_path / "absent"))
    (tmp_path / "long").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_env_file(str(tmp_path / "long"))
