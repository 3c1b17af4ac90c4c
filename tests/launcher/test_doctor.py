"""kvdist doctor on this machine alone; tests/machines has the real ones."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from kvdist.config.addresses import this_machine
from kvdist.estimate import flat
from kvdist_launch import doctor
from kvdist_launch.doctor import LinkTable, main, measure_links, name_twice_named
from kvdist_launch.host_pool import HostConnection, table
from kvdist_launch.hosts import Host
from kvdist_launch.options import parse_options, split_command
from kvdist_launch.probe import LinkSpeed, facts_of_this_host


@pytest.mark.parametrize("words", [[], ["-H", "localhost"]])
def test_this_machine_alone_needs_no_network_and_is_well(words, capsys):
    assert main(words) == 0
    titles, _, row, *_ = capsys.readouterr().out.splitlines()
    shown = dict(zip(titles.split(), row.replace("this machine", "here").split(), strict=True))
    assert shown["address"] == "here" and float(shown["GFLOP/s"]) > 0 and "MB/s" not in shown


def pasted(out):
    """The words of the last line, which is to be pasted, as a shell reads them."""
    return shlex.split(out.splitlines()[-1], comments=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["-n", "2"]),
        (["-H", "localhost"], ["-H", "localhost", "-n", "1"]),
        (["-H", "localhost:3", "--python", "/my python"], ["-H", "localhost:3", "--python", "/my python"]),
        (["-H", "localhost", "--ssh-option", "A=b", "--ssh-option", "C=d e", "--accept-new-host-keys"],
         ["-H", "localhost", "--ssh-option", "A=b", "--ssh-option", "C=d e", "--accept-new-host-keys", "-n", "1"]),
    ],
)  # fmt: skip
def test_the_last_line_starts_a_job_on_these_hosts(words, expected, capsys, monkeypatch):
    monkeypatch.setattr("kvdist_launch.probe.glob.glob", lambda _: [])  # no GPU
    assert main(words) == 0
    program, *line = pasted(capsys.readouterr().out)
    own, command = split_command(line)
    assert (program, own, command) == ("kvdist-launch", expected, ["python", "train.py"])
    assert parse_options(own).num_workers in (None, int(expected[-1]) if expected[-1].isdigit() else None)


def test_a_machine_with_gpus_gets_a_worker_for_each(capsys, monkeypatch):
    monkeypatch.setattr("kvdist_launch.probe.glob.glob", lambda _: ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"])
    assert main([]) == 0
    assert pasted(capsys.readouterr().out) == ["kvdist-launch", "-n", "3", "python", "train.py"]


def test_hosts_that_are_not_hosts_are_a_mistake(capsys):
    assert main(["-H", "a;b"]) == 2
    assert capsys.readouterr().err.startswith("kvdist doctor: error: ")


def test_an_unknown_option_is_refused_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--hostfiel", "a"])
    assert ended.value.code == 2
    assert "unknown option --hostfiel; did you mean --hostfile HOSTS?" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_a_problem(capsys):
    assert main(["-H", "localhost", "--sync-dst-dir", "/proc/version/job"]) == 1
    assert "localhost: /proc/version is not a folder" in capsys.readouterr().out


def connected(name, machine):
    """A host whose agent has said on which machine it is."""
    facts = facts_of_this_host() | {"machine": machine}
    return HostConnection(Host(name), None, facts)  # type: ignore[arg-type]


def test_two_names_of_one_machine_are_a_problem_of_the_second():
    hosts = [connected("d1", "a1"), connected("d2", "b2"), connected("d3", "a1"), connected("d4", "a1")]
    hosts[3].problem = "no python"
    name_twice_named(hosts)
    assert [one.problem for one in hosts] == [
        "",
        "",
        "the same machine as d1: name it once, with the slots of both, as in -H d1:2",
        "no python",
    ]


def test_two_names_of_this_machine_are_no_problem_as_the_launcher_takes_them():
    hosts = [connected("localhost", "a1"), connected("127.0.0.1", "a1")]
    name_twice_named(hosts)
    assert [one.problem for one in hosts] == ["", ""]


def test_a_host_that_is_this_machine_is_shown_as_such_and_has_no_link_to_itself():
    mine, other = connected("my-name", this_machine()), connected("d2", "b2")
    first, second = table([mine, other]).splitlines()[2:]
    assert first.split()[:3] == ["my-name", "this", "machine"] and "this machine" not in second
    pool = SimpleNamespace(here=connected("localhost", this_machine()), connections=[mine])
    assert measure_links(pool) == LinkTable(("my-name",), {})  # type: ignore[arg-type]


def test_the_tables_have_a_cell_for_each_direction_and_a_sentence_for_each_that_failed():
    speeds = {
        (0, 1): LinkSpeed(0.213, 117.6),
        (1, 0): LinkSpeed(0.25, 99.4),
        (0, 2): LinkSpeed(12.0, 3.0),
        (2, 0): LinkSpeed(problem="no answer from 10.0.0.1:7 within 3 s: a firewall, or no route"),
        (1, 2): LinkSpeed(1.0, 1000.0),
        (2, 1): LinkSpeed(1.0, 1000.0),
    }
    links = LinkTable(("this machine", "d1", "[x]"), speeds)
    lines = [line.split() for line in links.tables().splitlines() if "─" not in line]
    assert lines == [
        ["ms,", "there", "and", "back", "this", "machine", "d1", "[x]"],
        ["this", "machine", "0.21", "12.00"],
        ["d1", "0.25", "1.00"],
        ["[x]", "no", "1.00"],
        [],
        ["MB/s", "this", "machine", "d1", "[x]"],
        ["this", "machine", "118", "3"],
        ["d1", "99", "1000"],
        ["[x]", "no", "1000"],
    ]
    assert links.problems == ["[x] → this machine: no answer from 10.0.0.1:7 within 3 s: a firewall, or no route"]


def test_one_machine_alone_has_no_tables():
    assert LinkTable(("this machine",), {}).tables() == ""


def test_what_a_mode_would_make_is_told_where_the_model_is_given(capsys):
    assert main(["-H", "localhost", "--parameters", "1e6", "--step", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "take this machine alone: 1.00 times the rate of this machine alone" in out
    assert pasted(out) == ["python", "train.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parameters", "1e6"], "--parameters and --step need each other"),
        (["--speeds", "1"], "--speeds needs --parameters and --step"),
        (["--parameters", "1e6", "--step", "1", "--speeds", "1,2"], "--speeds has 2 values for 1 hosts"),
        (["--parameters", "many", "--step", "1"], "argument --parameters: 'many' is not a number above 0"),
        (["--speeds", "1,x"], "argument --speeds: 'x' is not a number above 0"),
        (["--batch", "0"], "argument --batch: '0' is not a whole number, at least 1"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(words, said, capsys):
    try:
        code = main(["-H", "localhost", *words])
    except SystemExit as ended:  # argparse has refused a value
        code = ended.code
    assert code == 2 and said in capsys.readouterr().err


def test_the_best_mode_is_started_on_the_hosts_that_take_part():
    hosts = [connected("a", "1"), connected("b", "2"), connected("c", "3")]
    hosts[1].host = Host("b", user="me")
    links = LinkTable(("this machine", "a", "b", "c"), {})
    words = ["-H", "hosts", "--accept-new-host-keys", "--parameters", "1e6", "--step", ".1", "--speeds"]
    for speeds, expected in (
        ("1,0.5,0.3", "-H hosts --accept-new-host-keys -n 3 --policy quota:768,local_steps python train.py"),
        ("1,1,0.01", "-H a,me@b --accept-new-host-keys -n 2 -s 0 --security none python train.py"),
        ("1,0.001,0.001", None),
    ):
        options = doctor._parser().parse_args([*words, speeds])
        options.speeds = flat(options.speeds)
        line = pasted(doctor._advice(options, hosts, doctor._modes(options, hosts, links)))
        assert line == (["kvdist-launch", *expected.split()] if expected else ["python", "train.py"])


def test_the_slowest_line_of_a_machine_is_one_between_hosts():
    speeds = {
        (0, 1): LinkSpeed(1.0, 3.0),
        (1, 0): LinkSpeed(1.0, 5.0),
        (1, 2): LinkSpeed(1.0, 90.0),
        (2, 1): LinkSpeed(1.0, 80.0),
    }
    links = LinkTable(("this machine", "d1", "d2"), speeds)
    assert links.slowest_of("d1", {"d1", "d2"}) == 80.0
    assert links.slowest_of("d1", {"this machine", "d1", "d2"}) == 3.0
