"""How ssh and rsync are called: words, and one string that a shell takes apart again as it was."""

from __future__ import annotations

import shlex
import subprocess
import sys

from kvdist.config.processes import module_words
from kvdist_launch.hosts import Host
from kvdist_launch.options import parse_options
from kvdist_launch.ssh import (
    SshOptions,
    SyncOptions,
    agent_command,
    far_command,
    python_of_hosts,
    rsync_command,
)
from tests.cases import each

AGENT = module_words("kvdist_launch.agent")


def test_ssh_never_asks_and_the_host_stands_behind_the_options():
    words = agent_command(Host("d1", port=2222, user="ann"), "/opt/my env/bin/python", SshOptions())
    assert words[0] == "ssh" and words[-3:] == ["--", "d1", shlex.join(["/opt/my env/bin/python", *AGENT])]
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} < set(words)
    assert words[words.index("-p") + 1] == "2222" and words[words.index("-l") + 1] == "ann"


def test_a_hosts_own_key_and_known_hosts_come_before_those_of_all():
    host = Host("d1", identity="/my keys/lab", known_hosts="/my keys/hosts")
    wanted = SshOptions(options=("UserKnownHostsFile=/all", "IdentityFile=/all"))
    copying = rsync_command(host, "/a", "/b", wanted, ())
    for words in (agent_command(host, "python", wanted), shlex.split(copying[copying.index("-e") + 1])):
        assert words[words.index("-i") + 1] == "/my keys/lab"
        own = words.index('UserKnownHostsFile="/my keys/hosts"')
        assert own < words.index("UserKnownHostsFile=/all"), "ssh takes the first"


def test_new_host_keys_are_accepted_only_when_that_was_asked_for():
    words = agent_command(Host("d1"), "python", SshOptions(accepts_new_host_keys=True, options=("ProxyJump=gate",)))
    assert "StrictHostKeyChecking=accept-new" in words and "ProxyJump=gate" in words


def test_activation_prints_nothing_into_the_protocol_and_its_variables_stay():
    command = far_command("echo", "echo noise; export FOUND=1; printf '%s' \"it's\" >&2")
    assert shlex.split(command)[:2] == ["bash", "-c"]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == f"{' '.join(AGENT)}\n"
    assert done.stderr == "noise\nit's"


@each("line", ["export A=1 # for later", "[ $# = 0 ]", "A='it''s'; export B=\"$A\" #}", "true;"])
def test_a_line_of_activation_may_hold_whatever_bash_takes(line):
    command = far_command("echo", line)
    assert "\n" not in command, "csh takes no line end between quotes"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{' '.join(AGENT)}\n", "")


def test_an_activation_chooses_the_interpreter_unless_one_is_named():
    activate = ["--activate", "source /opt/env/bin/activate"]
    assert python_of_hosts(parse_options(activate)) == "python"
    assert python_of_hosts(parse_options([*activate, "--python", "/opt/bin/python"])) == "/opt/bin/python"
    assert python_of_hosts(parse_options([])) == sys.executable


def test_a_failing_activation_starts_no_agent():
    done = subprocess.run(["sh", "-c", far_command("echo", "false")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""


def test_rsync_takes_the_folder_apart_from_the_host_and_deletes_nothing_unasked():
    sync = SyncOptions("/home/me/a b", "/srv/x y", excluded=("*.ckpt",))
    words = rsync_command(Host("fd00::2"), sync.source, sync.destination, SshOptions(), sync.words())
    assert words[-3:] == ["--", "/home/me/a b/", "[fd00::2]:/srv/x y/"]
    assert "-s" in words and "--exclude=*.ckpt" in words and "--filter=:- .gitignore" in words
    assert not any(word.startswith("--delete") for word in words)
    assert "--delete" in SyncOptions("/a", "/b", deletes=True).words()
    shell = shlex.split(words[words.index("-e") + 1])
    assert shell[0] == "ssh" and "BatchMode=yes" in shell
