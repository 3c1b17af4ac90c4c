"""Whether a process still runs is asked by its word, as its number may be another one's by now."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from kvdist.config.processes import may_run, this_process
from tests.cases import each

SAY = "from kvdist.config.processes import this_process; print(this_process(), flush=True); input()"


def test_a_process_runs_until_it_has_ended_reaped_or_not():
    with subprocess.Popen([sys.executable, "-c", SAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        word = one.stdout.readline().strip()
        assert word.startswith(f"{one.pid}.") and may_run(word)
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert not may_run(word), "nobody has reaped it"
    assert not may_run(word)


def test_a_later_process_with_the_number_of_an_earlier_one_is_another():
    pid, begin, namespace = this_process().split(".")
    assert may_run(this_process())
    assert not may_run(f"{pid}.{int(begin) - 1}.{namespace}")


def test_of_a_process_that_cannot_be_seen_from_here_nothing_is_known():
    pid, begin, namespace = this_process().split(".")
    assert may_run(f"{pid}.{int(begin) - 1}.{int(namespace) - 1}"), "another container counts anew"
    assert may_run(f"{pid}.-.{namespace}"), "its system did not say"


HIDDEN = """
import subprocess, sys
say, look = ([sys.executable, "-c", program] for program in sys.argv[1:])
# Of the new namespace of processes alone.
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
print("mounted", flush=True)
with subprocess.Popen(say, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
    word = one.stdout.readline()
    subprocess.run(look, input=word, check=True)
    one.kill()
subprocess.run(look, input=word, check=True)
"""
LOOK = """
import os, sys
from kvdist.config.processes import may_run
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
word = sys.stdin.readline().strip()
print(os.path.exists(f"/proc/{word.partition('.')[0]}"), may_run(word))
"""


def test_a_process_that_proc_hides_from_this_user_may_run_until_it_has_ended():
    if not shutil.which("unshare"):
        pytest.skip("makes no namespaces")
    words = ["unshare", "--mount", "--pid", "--fork", sys.executable, "-c", HIDDEN, SAY, LOOK]
    done = subprocess.run(words, capture_output=True, text=True)
    if not done.stdout:
        pytest.skip(f"cannot mount a /proc that hides processes: {done.stderr}")
    assert done.stdout.split("\n") == ["mounted", "False True", "False False", ""], done.stderr


@each("word", ["", "None", "1", "1.2", "x.2.3"])
def test_a_text_that_is_no_word_is_refused(word):
    with pytest.raises(ValueError):
        may_run(word.replace("3", this_process().rpartition(".")[2]))
