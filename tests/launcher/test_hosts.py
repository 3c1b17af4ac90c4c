"""Hostfiles and lists of hosts: what they mean, and that nothing that is no host gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.hosts import EXAMPLE_HOSTFILE, HOSTS_MAX, Host, parse_host_list, parse_hostfile, read_hosts
from tests.cases import each


def names(text: str) -> list[str]:
    return [host.name for host in parse_hostfile(text, "hosts")]


@each(
    "line, host",
    [
        ("d1", Host("d1")),
        ("d1:2222", Host("d1", port=2222)),
        ("alice@d1", Host("d1", user="alice")),
        ("alice@d1:22 slots=4", Host("d1", 4, 22, "alice")),
        ("10.0.0.7", Host("10.0.0.7")),
        ("[fd00::17]", Host("fd00::17")),
        ("me@[FD00:0::17]:2222", Host("fd00::17", port=2222, user="me")),
        ("[fe80::1%eth0]", Host("fe80::1%eth0")),
        ("D1.Example.ORG", Host("D1.Example.ORG")),
        ("GPUBox", Host("GPUBox")),
        ("my_alias-2", Host("my_alias-2")),
        ("d1 gpus=0,GPU-8a/b", Host("d1", gpus=("0", "GPU-8a/b"))),
        ("d1\tport=7  user=a.b role=server iface=eth1", Host("d1", port=7, user="a.b", iface="eth1", role=Role.SERVER)),
        ("d1 role=any", Host("d1")),
        ("d1 python=/opt/py/bin/python", Host("d1", python="/opt/py/bin/python")),
        ("d1 python='/my programs/python' # why", Host("d1", python="/my programs/python")),
        ('d1 python="/it\'s/python"', Host("d1", python="/it's/python")),
        ("d1 # slots=4", Host("d1")),
        ("d1\r", Host("d1")),
        ("  d1  ", Host("d1")),
    ],
)
def test_a_line_describes_a_host(line, host):
    assert parse_hostfile(line, "hosts") == [host]


@each(
    "text, expected",
    [
        ("host[01-03]", ["host01", "host02", "host03"]),
        ("host[8-11]", ["host8", "host9", "host10", "host11"]),
        ("host[08-11]x", ["host08x", "host09x", "host10x", "host11x"]),
        ("gpu[1,3,5-7]", ["gpu1", "gpu3", "gpu5", "gpu6", "gpu7"]),
        ("r[1-2]n[0-1].lan", ["r1n0.lan", "r1n1.lan", "r2n0.lan", "r2n1.lan"]),
        ("10.0.0.[9-11]", ["10.0.0.9", "10.0.0.10", "10.0.0.11"]),
        ("a\n\n  # nothing\nb", ["a", "b"]),
    ],
)
def test_ranges_in_brackets_stand_for_several_hosts(text, expected):
    assert names(text) == expected


def test_attributes_are_those_of_every_host_of_a_range():
    assert parse_hostfile("me@h[1-2]:5 slots=3", "hosts") == [Host(f"h{n}", 3, 5, "me") for n in (1, 2)]


HOSTILE_HOSTS = [
    "-oProxyCommand=touch${IFS}pwned", "-d1", "--", "-", "d1;touch pwned", "d1;id", "$(id)", "`id`", "d1|id", "d1&",
    "d1>x", "me@-oProxyCommand=id", "-oUser=x@d1", "me@me@d1", "@d1", "me;id@d1", "d1/../x", "../d1", "/etc/passwd",
    "d1\\", "d1*", "d1..lan", ".d1", "d1.", "d1-", "_d1", "d\x001", "d\x1b[31m", "d1\u2028d2", "dé", "d1:", "d1:0",
    "d1:65536", "d1:22x", "d1:-1", "d1:99999999999999999999", "d1:1:2", "d" * 64, "a." * 127 + "aa", "fd00::17",
    "[fd00::17", "fd00::17]", "[fd00::zz]", "[10.0.0.7]", "[]", "[fe80::1%;id]", "10.0.0.256", "10.1", "1234", "h[]",
    "h[1-", "h[a-c]", "h[3-1]", "h[1-2-3]", "h[01-1]", "h[9-010]", "h[0-4096]", "h[0-999999999]", "h[0-99][0-99]",
    "h[1,,2]", "h[-1]", "h[1]]", "'d1", 'd"1', "d1 slots", "d1 slots=", "d1 slots=0", "d1 slots=-1", "d1 slots=four",
    "d1 slots=1 slots=2", "d1 port=ssh", "d1:22 port=23", "me@d1 user=you", "d1 user=-oX", "d1 user=a;b", "d1 user=",
    "d1 python=", "d1 python=-c", "d1 python='a\x1bb'", "d1 gpus=", "d1 gpus=0,,1", "d1 gpus=0,0", "d1 gpus=all",
    "d1 iface=", "d1 iface=-x", "d1 iface=eth0;id", "d1 role=scheduler", "d1 role=", "d1 colour=red", "d1 d2",
    "d1,d2", "d1 role=server slots=2",
]  # fmt: skip


@each("line", HOSTILE_HOSTS)
def test_what_is_no_host_is_refused_with_file_line_and_text(line):
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(f"# first\n{line}\n", "my hosts")
    told = str(caught.value)
    assert told.startswith("my hosts, line 2: ")
    assert told.isprintable() and len(told) < 500


@each("entry", [line for line in HOSTILE_HOSTS if " " not in line and line != "d1,d2"])
def test_what_is_no_host_is_refused_in_a_list_too(entry):
    with pytest.raises(ConfigError) as caught:
        parse_host_list(f"ok,{entry}")
    assert str(caught.value).isprintable()


@given(st.text(max_size=30))
def test_no_name_of_a_host_can_be_an_option_or_reach_a_shell(text):
    try:
        hosts = parse_hostfile(text, "hosts")
    except ConfigError:
        return
    for host in hosts:
        assert not host.name.startswith("-")
        assert not set(host.name) & set(" \t\n\"'`$;&|<>(){}*?!\\/~#@")


@each(
    "line, advice",
    [
        ("fd00::17", r"write \[fd00::17\]"),
        ("d1 colour=red", "known are slots, port, user, identity, known_hosts, python, gpus, iface, role"),
        ("d1 slots=four", r"slots= is 'four'; write a number from 1 to"),
        ("h[01-100]", "write as many zeros before both"),
        ("10.0.0.256", "is not an IPv4 address"),
        ("d1 role=boss", "write role=server, role=worker or role=any"),
        ("d1 python='x", "a quote is not closed"),
        ("d1 role=server slots=2", "takes none"),
    ],
)
def test_a_refusal_says_what_to_write(line, advice):
    with pytest.raises(ConfigError, match=advice):
        parse_hostfile(line, "hosts")


def test_a_long_wrong_line_is_cut_off():
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("$" * 100_000, "hosts")
    assert len(str(caught.value)) < 400


@each(
    "text", ["d1\nd1", "d1\nD1 slots=2", "me@d1\nyou@d1", "h[1-3]\nh2", "localhost\n127.0.0.1", "LocalHost\nlocalhost"]
)
def test_a_host_that_stands_twice_is_refused_and_told_of_slots(text):
    with pytest.raises(ConfigError, match="is named twice; write it once: .*, slots=2 in a file"):
        parse_hostfile(text, "hosts")


def test_two_ports_of_one_address_are_two_hosts():
    assert names("gate:2201\ngate:2202") == ["gate", "gate"]


def test_more_hosts_than_anybody_has_are_refused_over_several_lines_too():
    assert len(names("h[1-4000]\ni[1-96]")) == HOSTS_MAX
    with pytest.raises(ConfigError, match=f"hosts, line 2: .* more than {HOSTS_MAX} hosts"):
        parse_hostfile("h[1-4000]\ni[1-97]", "hosts")


@each("text", ["", "\n\n", "# all\n  # comments"])
def test_a_file_without_hosts_is_refused(text):
    with pytest.raises(ConfigError, match="my/hosts contains no host; kvdist-launch --example-hostfile"):
        parse_hostfile(text, "my/hosts")


def test_the_example_is_a_valid_hostfile():
    hosts = parse_hostfile(EXAMPLE_HOSTFILE, "example")
    assert len(hosts) == 3 + 8 + 5 + 1
    assert hosts[2] == Host("d3", port=2222, user="alice")
    assert {host.role for host in hosts} == {None, Role.SERVER, Role.WORKER}


def test_a_number_behind_a_colon_is_slots_in_a_list_and_a_port_in_a_file():
    assert parse_host_list("a:2,b:3") == [Host("a", slots=2), Host("b", slots=3)]
    assert parse_hostfile("a:2\nb:3", "hosts") == [Host("a", port=2), Host("b", port=3)]


def test_a_list_knows_users_ranges_addresses_and_blanks():
    assert parse_host_list("me@a, h[1,3]:2 ,[::2]:4") == [
        Host("a", user="me"), Host("h1", 2), Host("h3", 2), Host("::2", 4),
    ]  # fmt: skip


@each(
    "text, message",
    [
        ("a,,b", "not a valid host name"),
        ("", "not a valid host name"),
        ("a:2,a:2", "is named twice"),
        ("a slots=2", "attributes belong in a hostfile"),
    ],
)
def test_a_list_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"^-H: .*{message}"):
        parse_host_list(text)


@each(
    "host, is_local",
    [
        (Host("localhost"), True),
        (Host("127.0.0.1", slots=3), True),
        (Host("::1"), True),
        (Host("localhost", port=2222), False),
        (Host("localhost", user="other"), False),
        (Host("localhost", identity="/key"), False),
        (Host("localhost", known_hosts="/hosts"), False),
        (Host("d1"), False),
    ],
)
def test_this_machine_is_reached_without_ssh_unless_its_line_says_how(host, is_local):
    assert host.is_local == is_local


def test_a_file_that_exists_wins_over_a_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:2").write_text("\ufeffd1:77\r\n", "utf-8")
    assert read_hosts("a:2") == [Host("d1", port=77)]
    assert read_hosts("b:2") == [Host("b", slots=2)]


@each("name, near", [("hsots", "hosts"), ("host", "hosts"), ("cluster1", "cluster")])
def test_a_mistyped_hostfile_is_told_with_the_one_that_is_meant(name, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / near).write_text("d1\n")
    (tmp_path / f"{name}.py").write_text("print('not a hostfile')")
    with pytest.raises(ConfigError, match=f"-H {name}: there is no such file; did you mean -H {near}\\?.* {name}:1"):
        read_hosts(name)
    assert read_hosts(f"{name}:1") == [Host(name, slots=1)]


def test_one_name_alone_is_a_host_that_may_have_been_meant_as_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (host,) = read_hosts("cluster")
    assert (host.name, host.is_alone) == ("cluster", True)
    assert not any(one.is_alone for text in ("a,b", "a:1", "ann@a") for one in read_hosts(text))


def test_options_of_ssh_stand_in_a_hostfile(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key of the lab").write_text("")
    line = "d[1-2] port=2222 identity='~/key of the lab' known_hosts=~/hosts\n"
    key, known = str(tmp_path / "key of the lab"), str(tmp_path / "hosts")
    expected = [Host(name, port=2222, identity=key, known_hosts=known) for name in ("d1", "d2")]
    assert parse_hostfile(line, "hosts") == expected


@each(
    "word, message",
    [
        ("identity=/absent", "identity= is '/absent', and there is no such file on this machine"),
        ("identity=-oProxyCommand=x", "identity= is .*; write the path of a file on this machine"),
        ("known_hosts='a\"b'", "known_hosts= is .*; write the path of a file on this machine"),
        ("known_hosts=$ABSENT/hosts", "known_hosts= .*no environment variable of that name"),
    ],
)
def test_a_file_of_ssh_that_cannot_be_used_is_refused(word, message):
    with pytest.raises(ConfigError, match=f"hosts, line 1: .*{message}"):
        parse_hostfile(f"d1 {word}", "hosts")


@each("name", ["hosts", "hosts.txt", "./a", "conf/hosts"])
def test_a_file_that_does_not_exist_is_told_with_both_readings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no such file, .*--example-hostfile.* list such as -H a:2,b:2"):
        read_hosts(name)


def test_a_file_that_is_no_text_or_too_long_or_a_folder_is_refused(tmp_path):
    binary, long = tmp_path / "binary", tmp_path / "long"
    binary.write_bytes(b"\xff\xfe\x00")
    long.write_bytes(b"#" * ((1 << 20) + 1))
    for path, message in ((binary, "not text in UTF-8"), (long, "more than 1048576 bytes"), (tmp_path, "a directory")):
        with pytest.raises(ConfigError, match=message):
            read_hosts(str(path))
