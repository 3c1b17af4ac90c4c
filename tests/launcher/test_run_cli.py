"""``kvdist-run``: horovodrun's words, and what they come to."""

from __future__ import annotations

import pytest

from kvdist.config.foreign import FOREIGN, FOREIGN_NAMES
from kvdist.errors import ConfigError
from kvdist_launch.hosts import Host
from kvdist_launch.request import Request
from kvdist_launch.run_cli import main, parse, request_of
from tests.cases import each

MACHINE = "node1.example.org"
ECHO = ["sh", "-c", 'echo "$0 $KVDIST_RANK/$DMLC_NUM_WORKER"; echo oops >&2']


def requested(*words: str) -> Request:
    own, _, command = parse([*words, "python", "train.py"])
    return request_of(own, command, MACHINE)


def test_words_become_those_of_kvdist_launch():
    request = requested(
        "-np", "3", "-H", "a:2,b[1-2]:1", "-p", "2222", "-i", "/k/id", "--start-timeout", "60", "--verbose",
        "--network-interfaces", "eth1", "--output-filename", "out", "-x", "A=b", "-x", "C",
        "--prefix-output-with-timestamp",
    )  # fmt: skip
    options = request.options
    assert (options.num_workers, options.num_servers, options.timestamps) == (3, 0, True)
    assert request.hosts == (Host("a", slots=2), Host("b1", slots=1), Host("b2", slots=1))
    assert options.ssh_option == ["Port=2222", "IdentityFile=/k/id"]
    assert options.x == ["A=b", "C"]
    assert (options.start_timeout, options.interface, request.allows_plaintext) == (60.0, "eth1", True)
    assert (request.is_filled, request.options.verbose, request.output_folder) == (True, True, "out")
    assert (list(request.words), request.program) == (["python", "train.py"], "kvdist-run")


def test_without_hosts_all_processes_are_here():
    request = requested("-np", "3")
    assert request.hosts == (Host("localhost", slots=3),)
    assert requested("--num-proc=3").options.num_workers == 3


def test_this_machine_may_stand_among_the_hosts_under_its_name():
    assert requested("-np", "2", "-H", "node1:1,d2:1").hosts == (Host("localhost", slots=1), Host("d2", slots=1))
    assert requested("-np", "1", "-H", "NODE1.example.org:1").hosts == (Host("localhost", slots=1),)
    with pytest.raises(ConfigError, match="this machine is named twice in the hosts"):
        requested("-np", "2", "-H", "localhost:1,node1:1")


def test_a_hostfile_has_lines_with_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2  # two\nb slots=1\n")
    assert requested("-np", "3", "-hostfile", str(path)).hosts == (Host("a", slots=2), Host("b", slots=1))


@each(
    "words, message",
    [
        (["-H", "a:2,b:1"], r"-np asks for 4 processes, but the hosts have 3 slots \(a: 2, b: 1\); .* -np 3"),
        (["-H", "a:2,b"], "b has no number of slots: write HOST:SLOTS after -H"),
        (["-H", "a:2:3"], "not a valid host name"),
        (["-hostfile", "/no/such"], "the hostfile /no/such cannot be read"),
        (["-H", "a:4", "--hostfile", "b"], "-H and -hostfile both name the hosts"),
    ],
)
def test_hosts_that_are_wrong_are_told(words, message):
    with pytest.raises(ConfigError, match=message):
        requested("-np", "4", *words)


@each(
    "words, variables",
    [
        ([], []),
        (["--timeline-filename", "t.json"], ["KVDIST_TIMELINE=t.json"]),
        (
            ["--timeline-filename", "t", "--timeline-mark-cycles"],
            ["KVDIST_TIMELINE=t", "KVDIST_TIMELINE_MARK_CYCLES=1"],
        ),
        (["--timeline-mark-cycles", "--no-timeline-mark-cycles"], []),
        (["--tcp"], ["NCCL_IB_DISABLE=1"]),
        (["--no-stall-check"], ["KVDIST_STALL_CHECK_S=0"]),
        (["--no-stall-check", "--stall-check"], []),
        (
            ["--stall-check-warning-time-seconds", "2", "--stall-check-shutdown-time-seconds", "5"],
            ["KVDIST_STALL_CHECK_S=2", "KVDIST_STALL_SHUTDOWN_S=5"],
        ),
        (["--stall-check-warning-time-seconds", "2", "--no-stall-check"], ["KVDIST_STALL_CHECK_S=0"]),
    ],
)
def test_options_of_the_libraries_are_told_by_variables(words, variables):
    assert requested("-np", "1", *words).options.env == variables


CONFIG = """\
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: horovod_autotune_log.txt
timeline:
  filename: horovod_timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: true
"""
"""With every section that Horovod's config_parser.py reads."""


def test_a_configuration_file_of_horovod_says_what_options_say_and_the_command_line_wins(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert requested("-np", "1", "--config-file", str(path)).options.env == [
        "KVDIST_TIMELINE=horovod_timeline.json",
        "KVDIST_TIMELINE_MARK_CYCLES=1",
        "HOROVOD_LOG_LEVEL=info",
        "KVDIST_STALL_CHECK_S=0",
        "KVDIST_STALL_SHUTDOWN_S=240",
    ]
    words = ["--timeline-filename", "mine.json", "--stall-check", "--no-timeline-mark-cycles", "--log-level=error"]
    assert requested("-np", "1", f"--config-file={path}", *words).options.env == [
        "KVDIST_TIMELINE=mine.json",
        "HOROVOD_LOG_LEVEL=error",
        "KVDIST_STALL_SHUTDOWN_S=240",
    ]
    _, idle, _ = parse(["-np", "1", "--config-file", str(path), "true"])
    assert {"--fusion-threshold-mb", "--cycle-time-ms", "--autotune", "--hierarchical-allreduce"} <= set(idle)


@each(
    "text, message",
    [
        (None, "cannot be read"),
        ("params: [", "cannot be read"),
        ("[]\n- 1", "cannot be read"),
        ("- 1", "is not a table of sections; known are params, autotune"),
        ("elastic: {min_np: 2}", "has no use for 'elastic'; sections are controller, params"),
        ("params: {fusion: 2}", "unknown option --fusion"),
        ("timeline: 3", "has no use for 'timeline'"),
        ("logging: {level: loud}", "--log-level: HOROVOD_LOG_LEVEL is 'loud'; it must be one of: trace, debug"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_a_usage_error(capsys, tmp_path, text, message):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["-np", "1", "--config-file", str(path), "true"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@each("row", [row for row in FOREIGN if not row.is_refused and "--" in row.names])
def test_what_has_no_effect_is_taken_with_one_line_that_says_why(capfd, row):
    options = [name for name in row.names.split() if name.startswith("-")]
    words = [word for name in options for word in [name.rstrip("=:"), *["7"] * (name[-1] in "=:")]]
    assert main(["-np", "1", *words, "true"]) == 0
    told = "; ".join(f"{name.rstrip('=:')} has no effect: {row.why}" for name in options)
    assert f"kvdist-run: {told}\n" in capfd.readouterr().err


@each("name", [name for name, row in FOREIGN_NAMES.items() if row.is_refused and name.startswith("-")])
def test_what_is_not_possible_is_refused(capsys, name):
    for words in ([name, "2"], [f"{name}=2"]):
        with pytest.raises(SystemExit) as caught:
            main(["-np", "1", *words, "true"])
        assert caught.value.code == 2
        assert f"kvdist-run: error: {name}: {FOREIGN_NAMES[name].why}" in capsys.readouterr().err


@each(
    "words, message",
    [
        (["true"], "the number of processes is missing: write -np PROCESSES"),
        (["-np", "0", "true"], "'0' is not a whole number of at least 1"),
        (["-np", "1", "--network-interfaces", "eth0,eth1", "true"], "name one interface"),
        (["-np", "1", "-p", "70000", "true"], "'70000' is not a port"),
        (
            ["-np", "1", "--fusion-threshold-mb", "-1", "true"],
            "--fusion-threshold-mb: '-1' is not a number of at least 0",
        ),
        (["-np", "1", "--cache-capacity=many", "true"], "--cache-capacity: 'many' is not a number of at least 0"),
        (["-np", "1", "--fusion", "3", "true"], "unknown option --fusion; --help lists all"),
        (["--np", "1", "true"], "unknown option --np; did you mean -np PROCESSES"),
        (["-n", "1", "true"], "unknown option -n; did you mean -np PROCESSES?"),
    ],
)
def test_a_wrong_option_is_a_usage_error(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_follows_the_command_belongs_to_it():
    own, idle, command = parse(["-np", "1", "--gloo", "python", "train.py", "-np", "5", "--mpi", "--min-np", "1"])
    assert (own.num_proc, idle, command[2:]) == (1, ["--gloo"], ["-np", "5", "--mpi", "--min-np", "1"])


def test_ranks_run_here_and_their_outputs_are_kept(capfd, tmp_path):
    assert main(["-np", "2", "--verbose", "--output-filename", str(tmp_path / "a" / "out"), *ECHO, "rank"]) == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["w0 │ rank 0/2", "w1 │ rank 1/2"]
    assert "kvdist-run: worker-1 on localhost: local rank 1 of 2, cross rank 0 of 1\n" in shown.err
    assert "kvdist-run: 2 workers finished in " in shown.err
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("std*")}
    assert files == {
        "a/out/rank.0/stdout": "rank 0/2\n", "a/out/rank.0/stderr": "oops\n",
        "a/out/rank.1/stdout": "rank 1/2\n", "a/out/rank.1/stderr": "oops\n",
    }  # fmt: skip


def test_the_first_failure_gives_the_exit_code(capfd):
    assert main(["-np", "2", "sh", "-c", "exit $((KVDIST_RANK * 5))"]) == 5
    assert main(["-np", "1", "sh", "-c", "kill -9 $$"]) == 137
    assert main(["-np", "2", "-H", "localhost:1", "true"]) == 2
    assert main(["-np", "2"]) == 2
    said = capfd.readouterr().err
    assert "kvdist-run: worker-1 (pid " in said
    assert "kvdist-run: error: -np asks for 2 processes, but the hosts have 1 slot (localhost: 1)" in said
    assert "kvdist-run: error: the command is missing" in said


def test_what_leaves_the_machine_is_not_encrypted_and_that_is_said_aloud(capfd, monkeypatch):
    monkeypatch.setattr("kvdist_launch.multi_host.run_on_hosts", lambda *_: 0)
    assert main(["-np", "1", "-H", "a:1", "true"]) == 0
    assert "WARNING: WHAT THE PROCESSES SEND TO EACH OTHER IS NOT ENCRYPTED" in capfd.readouterr().err
    assert main(["-np", "1", "true"]) == 0
    assert "ENCRYPTED" not in capfd.readouterr().err


def test_who_asks_for_encryption_between_machines_is_refused(capfd, monkeypatch):
    monkeypatch.setenv("KVDIST_SECURITY", "Curve")
    assert main(["-np", "1", "-H", "d1:1", "true"]) == 2
    assert "kvdist-run: error: KVDIST_SECURITY=curve asks for encryption, and what the w" in capfd.readouterr().err
    monkeypatch.delenv("KVDIST_SECURITY")
    assert main(["-np", "1", "-H", "d1:1", "-x", "KVDIST_SECURITY=curve", "true"]) == 2
    assert "KVDIST_SECURITY=curve asks for encryption" in capfd.readouterr().err


@pytest.mark.slow_cases("--check-build")
@pytest.mark.parametrize("name", ["-cb", "--check-build"])
def test_it_is_shown_what_can_be_trained_with(capfd, name):
    with pytest.raises(SystemExit) as caught:
        main([name])
    assert caught.value.code == 0
    shown = capfd.readouterr().out
    assert "Available Frameworks:\n" in shown and "] PyTorch\n" in shown
    assert "    [X] Gloo\n" in shown.partition("Operations:")[2]


def test_the_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name in ("-np", "-H", "-hostfile", "--start-timeout", "--output-filename", "--timeline-filename", "-cb"):
        assert name in shown
    assert all(name in " ".join(shown.split()) for name in FOREIGN_NAMES if name.startswith("--no-"))


def test_the_time_for_gloo_is_that_for_the_start_where_no_other_is_given():
    assert requested("-np", "1", "--gloo-timeout-seconds", "60").options.start_timeout == 60.0
    words = ["-np", "1", "--gloo-timeout-seconds", "60", "--start-timeout", "90"]
    assert requested(*words).options.start_timeout == 90.0


def test_no_time_for_the_start_is_refused(capfd):
    assert main(["-np", "1", "--start-timeout", "0", "true"]) == 2
    assert "_TIMEOUT_S is 0; it must be a number of seconds, above 0" in capfd.readouterr().err


def test_the_time_for_the_start_reaches_every_process(capfd):
    script = 'import os; print(os.environ["KVDIST_START_TIMEOUT_S"], os.environ["KVDIST_FORM_TIMEOUT_S"])'
    assert main(["-np", "1", "--start-timeout", "7.5", "python", "-c", script]) == 0
    assert capfd.readouterr().out == "w0 │ 7.5 7.5\n"
