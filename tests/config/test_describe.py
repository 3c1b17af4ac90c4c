"""`kvdist config`: what is shown of each setting."""

from __future__ import annotations

import pytest

from kvdist.__main__ import main
from kvdist.config.describe import all_settings, one_setting
from kvdist.config.environment import unknown_variables
from kvdist.config.settings import SETTINGS
from kvdist.errors import ConfigError
from tests.cases import each


def heads(environ):
    """Setting → what its line says behind its name."""
    text, _ = all_settings(160, environ)
    lines = [line.split(None, 1) for line in text.splitlines() if line.startswith("KVDIST_")]
    return dict(lines)


def test_every_setting_has_a_line_and_its_sentence():
    text, code = all_settings(1000, {})
    assert code == 0 and list(heads({})) == list(SETTINGS)
    assert all(f"\n    {row.sentence.split('[')[0].replace('`', '')}" in text for row in SETTINGS.values())
    assert "`" not in text and "](" not in text


@each(
    "environ, sentences",
    [
        ({"KVDIST_ONLOSS": "wait"}, ["KVDIST_ONLOSS is no setting; did you mean KVDIST_ON_LOSS?"]),
        ({"KVDIST_PATIENCE": "3"}, ["KVDIST_PATIENCE is no setting; did you mean KVDIST_PATIENCE_S?"]),
        ({"KVDIST_QQQ": "3"}, ["KVDIST_QQQ is no setting; kvdist config lists all"]),
        ({"KVDIST_ON_LOSS": "wait", "KVDIST_RANK": "0", "KVDIST_WATCHDOG": "x", "KVDIST_ONLOS": ""}, []),
    ],
)
def test_a_variable_that_no_setting_knows_is_told_with_the_nearest_one(environ, sentences):
    assert unknown_variables(environ) == sentences
    assert all(sentence in all_settings(160, environ)[0] for sentence in sentences)


@each(
    "environ, variable, line",
    [
        ({}, "KVDIST_IO_THREADS", "1 (default)"),
        ({}, "KVDIST_SECRET_FILE", "- (not set)"),
        ({}, "KVDIST_RANK", "- (default: the next free one)"),
        ({}, "KVDIST_SLICE_BYTES", "4194304 (default)"),
        ({"KVDIST_IO_THREADS": "4"}, "KVDIST_IO_THREADS", "4 (environment; default 1)"),
        ({"KVDIST_IO_THREADS": ""}, "KVDIST_IO_THREADS", "1 (default)"),
        ({"DMLC_ROLE": "worker"}, "KVDIST_ROLE", "worker (environment, alias DMLC_ROLE)"),
        ({"DMLC_ROLE": "worker", "KVDIST_ROLE": "server"}, "KVDIST_ROLE", "server (environment)"),
        (
            {"DMLC_PS_VAN_TYPE": "p3"},
            "KVDIST_PRIORITY_SLICES",
            "1 (environment, alias DMLC_PS_VAN_TYPE; default 0)",
        ),
        ({"DMLC_PS_VAN_TYPE": "zmq"}, "KVDIST_PRIORITY_SLICES", "0 (default)"),
        ({"DMLC_ROLE": "worker", "KVDIST_LOCAL_RANK": "0"}, "KVDIST_ROLE", "worker (launcher, alias DMLC_ROLE)"),
        ({"KVDIST_SUPERVISED": "1", "KVDIST_IO_THREADS": "2"}, "KVDIST_IO_THREADS", "2 (launcher; default 1)"),
    ],
)
def test_a_line_has_the_value_and_what_has_set_it(environ, variable, line):
    assert heads(environ)[variable] == line


def test_lines_are_no_longer_than_the_terminal_is_wide():
    for width in (60, 80, 160):
        assert max(map(len, all_settings(width, {})[0].splitlines())) <= width


def test_a_value_that_is_not_valid_is_shown_with_what_is_expected_and_the_others_too():
    environ = {"KVDIST_IO_THREADS": "two", "KVDIST_PLACEMENT": "hash", "MXNET_KVSTORE_SLICE_THRESHOLD": "0"}
    text, code = all_settings(160, environ)
    assert code == 2 and text.count("NOT VALID: ") == 2
    assert "    NOT VALID: KVDIST_IO_THREADS is 'two'; it must be a whole number from 1 to 64\n" in text
    assert heads(environ)["KVDIST_PLACEMENT"] == "hash (environment; default bytes)"
    text, code = one_setting("KVDIST_IO_THREADS", 160, environ)
    assert code == 2 and "NOT VALID" in text


@each("name", ["KVDIST_BIGARRAY_BOUND", "MXNET_KVSTORE_BIGARRAY_BOUND", "kvdist_bigarray_bound"])
def test_one_setting_is_shown_by_any_of_its_names(name):
    text, code = one_setting(name, 160, {"MXNET_KVSTORE_BIGARRAY_BOUND": "5"})
    assert code == 0
    assert [line.split(None, 1) for line in text.splitlines() if line][2:] == [
        ["value", "5"],
        ["from", "environment, alias MXNET_KVSTORE_BIGARRAY_BOUND"],
        ["default", "1000000"],
        ["expected", "a whole number, at least 1"],
        ["aliases", "MXNET_KVSTORE_BIGARRAY_BOUND"],
    ]
    assert text.startswith("KVDIST_BIGARRAY_BOUND\n    keys with at least") and "The scheduler's value counts" in text


@each(
    "name, said",
    [
        ("KVDIST_ONLOSS", "there is no setting KVDIST_ONLOSS; did you mean KVDIST_ON_LOSS or"),
        ("on_loss", "there is no setting on_loss; did you mean KVDIST_ON_LOSS?"),
        ("DMLC_ROL", "did you mean DMLC_ROLE"),
        ("banana", "there is no setting banana; kvdist config lists all"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(name, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        one_setting(name, 80, {})


def test_a_variable_that_changes_nothing_is_said_to():
    assert one_setting("PS_RESEND", 80, {}) == ("PS_RESEND has no effect: a lost message is always sent again", 0)


def test_the_command_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("KVDIST_IO_THREADS", "3")
    assert main(["config"]) == 0
    assert "KVDIST_IO_THREADS             3 (environment; default 1)\n" in capsys.readouterr().out
    assert main(["config", "KVDIST_IO_THREADS"]) == 0
    assert "    value      3\n    from       environment\n" in capsys.readouterr().out
    assert main(["config", "KVDIST_IO_THREAD"]) == 2
    assert capsys.readouterr().err == "kvdist: there is no setting KVDIST_IO_THREAD; did you mean KVDIST_IO_THREADS?\n"


def test_a_file_gets_the_tables(tmp_path, capsys):
    file = tmp_path / "page.md"
    file.write_text("<!-- settings: Without servers -->\n<!-- end of settings -->\n")
    assert main(["config", "--update", str(file)]) == 0
    assert "| `KVDIST_START_TIMEOUT_S` |" in file.read_text() and str(file) in capsys.readouterr().out
