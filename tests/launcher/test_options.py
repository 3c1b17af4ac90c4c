"""The options: whose word is whose, and what each accepts."""

from __future__ import annotations

import pytest

from kvdist_launch.options import OPTIONS, asked, parse_options, split_command
from tests.cases import each


@each(
    "words, own, command",
    [
        ("-n 2 python train.py -n 5 --env x", "-n 2", "python train.py -n 5 --env x"),
        ("-n 2 -s 1 -- python train.py -- -n 5", "-n 2 -s 1", "python train.py -- -n 5"),
        ("-n2 --env=A=b train", "-n2 --env=A=b", "train"),
        ("--env A=b --env-worker C:d -n 1 ./train --version", "--env A=b --env-worker C:d -n 1", "./train --version"),
        ("-H hosts -x A --sync-delete -s 3 train -x B", "-H hosts -x A --sync-delete -s 3", "train -x B"),
        ("--timestamps --filter w0 train", "--timestamps --filter w0", "train"),
        ("--print-completion bash", "--print-completion bash", ""),
        ("-n 2 -- -odd-name", "-n 2", "-odd-name"),
        ("--env -- train", "--env --", "train"),
        ("--version train", "--version", "train"),
        ("-n 2", "-n 2", ""),
        ("-n", "-n", ""),
        ("", "", ""),
    ],
)
def test_options_after_the_command_belong_to_the_command(words, own, command):
    assert split_command(words.split()) == (own.split(), command.split())


@each(
    "words, name, value",
    [
        (["--port-range", "20000-20100"], "port_range", (20000, 20100)),
        (["--port-range", "7:7"], "port_range", (7, 7)),
        (["--server-device", "cuda:0, CUDA:1"], "server_device", "cuda:0,cuda:1"),
        (["--interface", "eth1"], "interface", "eth1"),
        (["--interface", "10.1.2.3/16"], "interface", "10.1.0.0/16"),
        (["--interface", "fd00::/8"], "interface", "fd00::/8"),
        (["--on-worker-exit", "abort"], "on_worker_exit", 0),
        (["--on-worker-exit", "restart:3"], "on_worker_exit", 3),
        (["--filter", "w0,s*,scheduler"], "filter", ("w0", "s*", "scheduler")),
        (["--sync-dst-dir", "/tmp//my job/./x/"], "sync_dst_dir", "/tmp/my job/x"),
        (["--sync-exclude", "*.pt", "--sync-exclude", "- data"], "sync_exclude", ["*.pt", "- data"]),
        (["--ssh-option", "ProxyJump=gate"], "ssh_option", ["ProxyJump=gate"]),
        (["--grace", "0"], "grace", 0.0),
        (["--start-timeout", "2.5"], "start_timeout", 2.5),
        (["--activate", "source '/my env/activate'"], "activate", "source '/my env/activate'"),
        (["-x", "A=b", "-x", "C"], "x", ["A=b", "C"]),
        (["--python", "/opt/my py/python"], "python", "/opt/my py/python"),
    ],
)
def test_an_options_text_becomes_a_value(words, name, value):
    assert getattr(parse_options(words), name) == value


@each(
    "words, message",
    [
        (["--port-range", "20100-20000"], "write FIRST-LAST, as in 20000-20100"),
        (["--server-device", "gpu0"], "--server-device is 'gpu0'; it must be cpu, cuda:0 for"),
        (["--port-range", "0-5"], "is not a range of ports"),
        (["--port-range", "1-65536"], "is not a range of ports"),
        (["--interface", "-eth1"], "expected one argument"),
        (["--interface=-eth1"], "such as eth1, nor a network"),
        (["--interface", "10.0.0.0/33"], "such as eth1, nor a network"),
        (["--interface", "eth0;id"], "such as eth1, nor a network"),
        (["--on-worker-exit", "continue"], "write abort, or restart:N"),
        (["--on-worker-exit", "restart:0"], "write abort, or restart:N"),
        (["--filter", "w0,"], "write names of processes"),
        (["--filter", "w0;id"], "write names of processes"),
        (["--sync-dst-dir", "relative"], "must be the absolute path"),
        (["--sync-dst-dir", "/tmp/../etc"], "must be the absolute path"),
        (["--sync-dst-dir", "/"], "must be the absolute path"),
        (["--sync-dst-dir", "/tmp/a\nb"], "must be the absolute path"),
        (["--sync-dst-dir=-e sh"], "must be the absolute path"),
        (["--sync-exclude", ""], "must be a line of text"),
        (["--ssh-option", "ProxyJump"], "write NAME=VALUE as in ssh_config"),
        (["--ssh-option=-oA=b"], "write NAME=VALUE as in ssh_config"),
        (["--ssh-option", "A=b\nProxyCommand=id"], "write NAME=VALUE as in ssh_config"),
        (["--scheduler-on=-oProxyCommand=id"], "must not begin with a hyphen"),
        (["--python=-c"], "must not begin with a hyphen"),
        (["--start-timeout", "nan"], "is not a number of seconds"),
        (["--start-timeout", "soon"], "is not a number of seconds"),
        (["--launcher", "k8s"], "invalid choice: 'k8s'"),
        (["--launcher", "sge"], "'sge', which only MXNet's launcher has; --launcher none prints"),
        (["--launcher=yarn"], "'yarn', which only MXNet's launcher has; --launcher none prints"),
        (["--p3"], "unknown option --p3; -x DMLC_PS_VAN_TYPE=p3, or kv.create('p3'), gives priority slices"),
        (["--emit", "pdf"], "invalid choice: 'pdf'"),
        (["--on-loss", "contine"], "'contine' is unknown; did you mean continue?"),
        (["--activate", "a\nb"], "must be a line of text"),
    ],
)
def test_what_an_option_cannot_mean_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        parse_options(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_only_what_differs_from_the_default_counts_as_asked():
    assert asked(parse_options(["-n", "1", "--timestamps", "--launcher", "ssh", "--on-worker-exit", "abort"])) == [
        "--num-workers", "--launcher", "--timestamps",
    ]  # fmt: skip


def test_no_option_stands_twice():
    names = [name for names, _ in OPTIONS for name in names]
    assert len(names) == len(set(names))
