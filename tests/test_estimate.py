"""What each way of training would make of some machines, by the model of ``kvdist estimate``."""

from __future__ import annotations

import shlex

import pytest

from kvdist.__main__ import main
from kvdist.estimate import STALE, MachineSpeed, best_of, line_to_paste, measure_gflops, modes
from kvdist_launch.options import parse_options, split_command

GRADED = (1.0, 0.6, 0.4, 0.25)
FAST_LINE = 1e9


def found(speeds, mb_per_s=FAST_LINE, parameters=30e6, step_s=0.3):
    machines = [MachineSpeed(f"m{number}", speed, mb_per_s) for number, speed in enumerate(speeds)]
    return {mode.name: mode.rate * step_s for mode in modes(machines, parameters, step_s)}


def test_without_the_network_ddp_is_the_slowest_times_all_and_a_quota_the_sum():
    rates = found(GRADED)
    assert rates["m0 alone"] == 1
    assert rates["DDP on all"] == pytest.approx(4 * 0.25)
    assert rates["DDP on m0, m1"] == pytest.approx(1.2)  # the best of its subsets
    assert rates["dist"] == pytest.approx(4 * 0.25, rel=1e-4)
    assert rates["quota(4 batches)"] == pytest.approx(STALE * 2.25)
    assert rates["quota(32 batches, local_steps=True)"] == pytest.approx(2.25)


def test_the_line_bounds_what_exchanges_in_each_step():
    # 2 · ½ · 120 MB over 60 MB/s is 2 s; DDP hides two thirds of a step behind it, dist nothing
    rates = found((1, 1), mb_per_s=60, parameters=30e6, step_s=1.0)
    assert rates["DDP on all"] == pytest.approx(2 / (1 / 3 + 2))
    assert rates["dist"] == pytest.approx(2 / (1 + 2))
    assert rates["diloco(100)"] == pytest.approx(200 / 102)


def test_a_quota_of_local_steps_is_as_large_as_hides_the_exchange():
    rates = found((1, 1), mb_per_s=6, parameters=30e6, step_s=1.0)  # an exchange takes 20 s
    assert rates["quota(40 batches, local_steps=True)"] == pytest.approx(2)


def test_a_line_to_paste_is_one_that_the_launcher_takes():
    for mode in modes([MachineSpeed(name, 1.0, FAST_LINE) for name in "ab"], 1e6, 1.0, batch=5):
        program, *words = shlex.split(line_to_paste(mode), comments=True)
        own, command = split_command(words) if program == "kvdist-launch" else ([], [program, *words])
        policy = parse_options(own).policy
        assert command == ["python", "train.py"]
        assert policy is None or policy.startswith(("diloco:100", "quota:10", "quota:80,local_steps"))


def test_of_modes_that_are_alike_the_simplest_is_taken():
    machines = [MachineSpeed(name, 1.0, FAST_LINE) for name in "ab"]
    assert best_of(modes(machines, 1e6, 1.0)).name == "DDP on all"


def test_the_command_prints_a_table_and_what_to_take(capsys):
    words = "estimate --speeds 2 1.2 .8 .5 --names a b c d --mb-per-s 110 --parameters 30e6 --step .3"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a", "alone", "1.00", "one", "machine"]
    line = "  kvdist-launch -H a,b,c,d -n 4 --policy quota:1024,local_steps python train.py"
    assert lines[-2] == "take quota(32 batches, local_steps=True): 2.25 times the rate of a alone"
    assert lines[-1] == f"{line}  # for batches of 32 examples (--batch)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--speeds 1 1", "--mb-per-s, --parameters, --step missing"),
        ("--speeds 1 1 --mb-per-s 1 2 3 --parameters 1 --step 1", "--mb-per-s has 3 values for 2 machines"),
        ("--speeds 1 1 --mb-per-s 1 --names a --parameters 1 --step 1", "--names has 1 values for 2 machines"),
    ],
)
def test_numbers_that_do_not_go_together_are_named(words, said, capsys):
    assert main(["estimate", *words.split()]) == 2
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("word", ["0", "-1", "nan", "inf", "fast"])
def test_a_speed_must_be_a_number_above_0(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "--speeds", "1", f"--mb-per-s={word}"])
    assert ended.value.code == 2 and f"'{word}' is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("speeds", [["1,.5"], ["1", ".5"], ["1, .5"], ["1,", ".5"], ["1 .5"]])
def test_speeds_have_commas_or_blanks_between_them(speeds, capsys):
    rest = ["--mb-per-s", "110,55", "--names", "a,b", "--parameters", "30e6", "--step", ".3"]
    assert main(["estimate", "--speeds", *speeds, *rest]) == 0
    shown = capsys.readouterr().out
    assert main(["estimate", "--speeds", "1", ".5", "--mb-per-s", "110", "55", "--names", "a", "b", *rest[4:]]) == 0
    assert shown == capsys.readouterr().out


def test_this_machine_has_a_speed():
    assert measure_gflops() > 0
