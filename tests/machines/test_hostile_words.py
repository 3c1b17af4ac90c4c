"""Words that made other launchers run commands: here each is refused with a sentence, or arrives as it is.

Every attempt would leave a file behind if any shell had taken it apart, on the launching machine or on another one.
"""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.machines

SHOW = (
    "import json, os, sys; print('SHOWN ' + json.dumps([sys.argv[1:], os.environ.get('AWKWARD'), os.getcwd()]));"
    " from kvdist import kv; kv.create('dist').close()"
)


def attempts(mark):
    """Texts that run ``touch`` in one shell or another."""
    return [
        f"; touch {mark};",
        f"$(touch {mark})",
        f"`touch {mark}`",
        f"' ; touch {mark} ; '",
        f'" ; touch {mark} ; "',
        f"\n touch {mark} \n",
        f"|| touch {mark} || ",
        f"\\'; touch {mark} #",
        f"${{IFS}}touch${{IFS}}{mark}",
        f"-oProxyCommand=touch {mark}",
        f"--rsync-path=touch {mark}",
        f"é\u2028\t {{touch,{mark}}} !! ~ * ? [a]",
    ]


@pytest.fixture
def mark(machines, tmp_path):
    """A path that every machine could make a file at; nobody may have, in the end."""
    path = tmp_path / "mark"
    yield path
    assert not path.exists(), "something ran it"


@pytest.mark.parametrize("number", range(len(attempts(""))))
def test_arguments_and_values_arrive_byte_for_byte_and_are_never_run(machines, launch, mark, number):
    text = attempts(mark)[number]
    words = ("-n", "1", "-s", "1", "-H", "d1", "--no-preflight", "--env", f"AWKWARD={text}")
    job = launch(*words, "--", "python", "-c", SHOW, text, AWKWARD_TOO=text)
    assert job.finish() == 0, job.text
    (line,) = job.lines_with("SHOWN ")
    arguments, value, _ = json.loads(line.partition("SHOWN ")[2])
    assert arguments == [text] and value == text


@pytest.mark.parametrize("number", range(len(attempts(""))))
def test_hosts_users_and_interpreters_of_that_kind_are_refused(launch, project, mark, number):
    text = attempts(mark)[number]
    for words in (
        ("-H", f"d1,{text}"),
        ("-H", f"{text}@d1"),
        ("-H", f"d1:{text}"),
        ("-H", "evil-hosts"),
    ):
        (project / "evil-hosts").write_text(f"d1 user={text}\n{text}\n")
        job = launch("-n", "1", "-s", "1", *words, "true")
        assert job.finish() == 2, job.text
        assert "kvdist-launch: error: " in job.text


@pytest.mark.parametrize("number", range(len(attempts(""))))
def test_destinations_of_that_kind_hurt_nobody(machines, launch, mark, number):
    text = attempts(mark)[number]
    destination = f"{machines.destination}/a{text}b"
    words = ("-n", "1", "-s", "1", "-H", "d1", "--sync-dst-dir", destination, "python", "-c", SHOW)
    job = launch(*words)
    code = job.finish()
    if code == 0:
        (line,) = job.lines_with("SHOWN ")
        folder = json.loads(line.partition("SHOWN ")[2])[2]
        assert folder.startswith(f"{machines.destination}/a")
    else:
        assert code == 2 and ("--sync-dst-dir" in job.text or "rsync" in job.text), job.text


def test_a_folder_with_blanks_and_quotes_is_copied_to_and_run_in(machines, launch):
    destination = f'{machines.destination}/it\'s my "project" $HOME'
    job = launch("-n", "2", "-s", "2", "-H", "d1,d2", "--sync-dst-dir", destination, "python", "rounds.py", "end", "2")
    assert job.finish() == 0, job.text
    assert len(job.lines_with(f"found what lies beside in {destination}")) == 2


def test_a_python_with_blanks_and_quotes_in_its_path_is_found_or_named(machines, launch, mark):
    job = launch("-n", "1", "-s", "1", "-H", "d1", "--python", f"/opt/it's; touch {mark}/python", "true")
    assert job.finish() == 2, job.text
    assert job.lines_with("there is no ") and job.lines_with("--python")
