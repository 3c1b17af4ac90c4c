"""What ``--dry-run`` shows of a plan."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from kvdist.nodes import SCHEDULER, worker
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host
from kvdist_launch.plan import LAUNCHER, Process, preview, quoted


def test_a_preview_names_host_folder_layers_and_words_and_hides_secrets():
    environment = Environment({"OMP": "2"}, {"PATH": "/a b"}, {"Z": "1", "MY_TOKEN": "geheim", "A": "it's"})
    processes = [
        Process(SCHEDULER, LAUNCHER, ("python", "-m", "kvdist"), Environment()),
        Process(worker(0), 0, ("python", "a b.py"), environment, "/my job"),
    ]
    assert (
        preview(processes, [Host("d1")])
        == """\
scheduler on the launching machine
  run     python -m kvdist

worker-0 on d1 in '/my job'
  default OMP=2
  front   PATH='/a b'
  set     A='it'"'"'s'
  set     MY_TOKEN='(hidden)'
  set     Z=1
  run     python 'a b.py'
"""
    )


AWKWARD = ["", "a", "a b", "it's", "$(id)", "é", "a\nb", "\x1b[31m'", "\\\n", "tab\t", "\udcff\n", "\x01f"]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_quoted_word_is_itself_to_bash_and_cannot_steer_a_terminal(text):
    assert quoted(text).isprintable()
    shown = subprocess.run(["bash", "-c", f"printf %s {quoted(text)}"], capture_output=True, check=True).stdout
    assert shown == text.encode(errors="surrogateescape")
    assert not text.isprintable() or shlex.split(quoted(text)) == [text]
