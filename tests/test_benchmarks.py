"""The benchmarks measure what they say: their checks fail on a wrong result, and their scripts run."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.cases import each

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def importable() -> Iterator[None]:
    """The scripts import each other as scripts do: from the folder they lie in."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def workload() -> ModuleType:
    return load("workers.workload")


def test_a_sum_without_one_worker_ends_the_benchmark(workload: ModuleType) -> None:
    expected = workload.Expected("none", num_workers=2).after_step()
    workload.check([np.full(100, 3.0, np.float32)], [expected], step=0)
    with pytest.raises(SystemExit, match="key 1"):
        workload.check([np.full(100, 3.0), np.full(100, 2.0)], [expected], step=0)


def test_the_expected_weights_follow_momentum_and_adam(workload: ModuleType) -> None:
    sgd, adam = workload.Expected("sgd", num_workers=2), workload.Expected("adam", num_workers=2)
    assert [sgd.after_step(), sgd.after_step()] == pytest.approx([-0.03, -0.03 - 0.057])
    assert [adam.after_step(), adam.after_step()] == pytest.approx([-0.01, -0.02], rel=1e-6)


@each("text", ["25", "x25", "25x", "25xx4", "-1x4", "named=", "1x2+", "a=b=1x2x3"])
def test_a_spec_that_is_none_is_refused(workload: ModuleType, text: str) -> None:
    with pytest.raises(Exception, match="is not COUNTxELEMENTS"):
        workload.Spec.parse(text)


@each("text, name", [("25x1048576", "25x1048576"), ("net=1x7+3x5+1x7", "net")])
def test_a_spec_reads_what_it_writes(workload: ModuleType, text: str, name: str) -> None:
    spec = workload.Spec.parse(text)
    assert (spec.name, spec.text, workload.Spec.parse(spec.text)) == (name, text, spec)


@each(
    "model, tensors, parameters",
    [("resnet50", 161, 25_557_032), ("vgg16", 32, 138_357_544), ("bert-base", 199, 109_482_240)],
)
def test_a_model_has_its_published_number_of_parameters(model: str, tensors: int, parameters: int) -> None:
    spec = load("models").parse_spec(model)
    assert (spec.count, sum(spec.sizes)) == (tensors, parameters)


def test_systems_take_turns_and_one_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    systems, order = load("systems"), []

    def one_turn(name: str, folder: str) -> None:
        order.append(name)
        if name == "b" and order.count("b") == 2:
            raise RuntimeError("it fell over")
        Path(folder, "0.json").write_text("[1.0, 2.0, 9.0]")

    measured = systems.take_turns(["a", "b", "c"], one_turn, turns=3)
    assert order == ["a", "b", "c", "a", "b", "c", "a", "c"]
    assert measured["a"].seconds == [1.0, 2.0, 9.0] * 3
    assert (measured["a"].median_s, measured["a"].turn_medians_s) == (2.0, [2.0] * 3)
    assert (measured["b"].seconds, measured["b"].left_out) == ([], "it fell over")


def test_a_turn_without_a_result_is_no_turn(tmp_path: Path) -> None:
    measured = load("systems").take_turns(["idle"], lambda name, folder: None, turns=2)
    assert "without a result" in measured["idle"].left_out


def test_all_reduce_is_not_compared_with_what_it_cannot_do(workload: ModuleType) -> None:
    systems = load("systems")
    spec = workload.Spec.parse("2x3")
    assert not systems.SYSTEMS["horovod"].refuses(systems.Work(spec))
    assert "optimizer" in systems.SYSTEMS["horovod"].refuses(systems.Work(spec, optimizer="adam"))
    assert "nothing to reduce" in systems.SYSTEMS["ddp"].refuses(systems.Work(spec, workers=1))
    assert "dist_async" in systems.SYSTEMS["gloo-flat"].refuses(systems.Work(spec, store="dist_async"))


def test_a_row_is_slower_only_if_its_whole_interval_is() -> None:
    compare, noise = load("compare").compare, np.random.default_rng(1).normal(1.0, 0.1, (2, 15))
    steady = compare([1.0] * 15, [1.1] * 15)
    assert steady.is_slower and steady.low == steady.ratio == steady.high == pytest.approx(1 / 1.1)
    same = compare(noise[0], noise[1])
    assert not same.is_slower and same.low < 1 < same.high
    assert compare(noise[0], 1.5 * noise[1]).is_slower


def test_a_comparison_in_which_both_sides_run_the_same_code_is_refused(tmp_path: Path) -> None:
    compare = load("compare")
    compare.check_imports(compare.ROOT)
    with pytest.raises(RuntimeError, match="was to be measured, but Python imports"):
        compare.check_imports(tmp_path)


def test_processes_that_fail_end_their_companions_and_are_quoted() -> None:
    cluster = load("cluster")
    words = [sys.executable, "-c"]
    waits = cluster.Start([*words, "import signal; signal.pause()"], cluster.environment())
    fails = cluster.Start([*words, "print('what went wrong'); raise SystemExit(3)"], cluster.environment())
    with pytest.raises(RuntimeError, match=r"(?s)what went wrong.*ended with code 3"):
        cluster.run_together([waits, fails], timeout_s=120)


def test_push_pull_measures_a_local_store_and_writes_the_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "push_pull.py"), "--store", "local", "--workers", "1", "--spec", "3x17"]
    command += ["--steps", "2", "--warmup", "1", "--turns", "1", "--json", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (result,) = json.loads(path.read_text())["results"]
    assert (result["system"], result["spec"], result["steps"]) == ("kvdist", "3x17", 2)
    assert "median ms" in printed


@pytest.mark.slow
def test_kernels_are_measured_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    path = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--elements", "17", "--repeats", "1", "--no-torch"]
    subprocess.run([*command, "--json", str(path)], capture_output=True, check=True)
    results = json.loads(path.read_text())["results"]
    assert {result["backend"] for result in results} == {"numpy", "numba"}
    coders = set(load("kernels").CODERS)
    rules = {"sgd", "momentum", "nag", "adam", "adamw"}
    assert {result["kernel"] for result in results} == {"sum"} | rules | coders
    assert {"2-bit", "2-bit back"} <= coders


def write_ends(folder: Path, *moved: list[float]) -> None:
    for rank, one in enumerate(moved):
        Path(folder, f"{rank}.end").write_text(json.dumps({"moved": one}))


def test_training_counts_only_if_all_workers_end_alike_and_where_the_others_do(tmp_path: Path) -> None:
    end_to_end = load("end_to_end")
    write_ends(tmp_path, [1.0, 2.0], [1.0, 2.0])
    ours = end_to_end.same_weights(tmp_path)
    end_to_end.compare({"alone": [9.0, 9.0], "kvdist": ours, "ddp": [1.0, 2.001]})
    with pytest.raises(RuntimeError, match="ddp has moved the weights by 6, kvdist by 3"):
        end_to_end.compare({"kvdist": ours, "ddp": [2.0, 4.0]})
    write_ends(tmp_path, [1.0, 2.0], [1.0, 2.5])
    with pytest.raises(RuntimeError, match="different weights"):
        end_to_end.same_weights(tmp_path)


def test_the_bound_of_two_hosts_is_one_pass_over_the_line(workload: ModuleType) -> None:
    spec = workload.Spec.parse("25x1000000")  # 100 MB: 0.8 s of a line of 1 Gbit/s
    bound_s = load("namespaces").bound_s
    assert bound_s(spec, mbit=1000) == pytest.approx(0.8)
    assert bound_s(spec, mbit=1000, hosts=4) == pytest.approx(1.2)


def test_every_row_names_systems_that_its_contest_holds() -> None:
    targets = load("targets")
    held = {contest.name: contest.systems for contest in targets.CONTESTS}
    for row in targets.ROWS:
        assert row.ours in held[row.contest]
        assert row.peer in (*held[row.contest], "bound")
        assert row.target < row.stretch
    names = [contest.name for contest in targets.full_contests()]
    assert len(set(names)) == len(names)


def test_a_row_says_whether_its_ratio_is_reached_and_why_it_is_missing() -> None:
    report_module, systems, targets = load("report"), load("systems"), load("targets")
    contest = targets.CONTESTS[0]
    ours = ("kvdist", "kvdist-resident", "kvdist-tcp")
    rows = [targets.Row("title", contest.name, one, "mxnet", 3.0, 4.0) for one in ours]
    report = report_module.Report(load("cluster").machine(), 1, rows)
    measured = {name: systems.Measured([1.0], turn_medians_s=[1.0, 2.0]) for name in contest.systems}
    measured["mxnet"] = systems.Measured([1.0, 3.5, 9.0], turn_medians_s=[3.5, 4.0])
    measured["kvdist-resident"] = systems.Measured([4.0], turn_medians_s=[4.0, 4.0])
    measured["kvdist-tcp"] = systems.Measured(left_out="a trace\nit fell over", failed=True)
    report.add(contest, measured)
    assert [(row["ratio"], row["reached"]) for row in report.verdicts()] == [
        (3.5, "yes"),
        (0.88, "no"),
        (None, "not measured: it fell over"),
    ]
    assert report.failures() == [f"{contest.name} with kvdist-tcp: it fell over"]
    assert "| title | kvdist | 1000.0 | MXNet 1.9.1 | 3500.0 | 3.5 | 2 to 3.5 | 3 (4) | yes |" in report.markdown()


@each(
    "workers, servers, layout, passes",
    [(2, 2, "colocated", 1.0), (4, 4, "colocated", 1.5), (4, 2, "colocated", 2.0), (4, 4, "separate", 1.0)],
)
def test_the_bounds_are_those_of_the_cost_model(workers: int, servers: int, layout: str, passes: float) -> None:
    scale, modelled = load("scale"), load("modelled")
    card = modelled.Card(bytes_per_s=1e9, latency_s=0.0)
    shape = scale.Shape(workers, servers, layout)
    assert scale.bound_s(shape, 10**9, card) == pytest.approx(passes)
    if layout == "colocated" and workers == servers:
        assert scale.ring_s(workers, 10**9, card) == pytest.approx(passes)


def run_out(clock: Any) -> None:
    while clock.step():
        pass


def test_a_card_serves_its_connections_in_turns() -> None:
    modelled = load("modelled")
    clock, done = modelled.Clock(), []
    rotation = modelled.Rotation(modelled.Cores(clock, 1), lambda amount: amount)
    for name in ("a1", "a2", "b1"):
        rotation.add(name[0], 1.0, lambda name=name: done.append((name, clock.now)))
    run_out(clock)
    assert done == [("a1", 1.0), ("b1", 2.0), ("a2", 3.0)]


def test_threads_share_cores_and_who_has_had_least_comes_first() -> None:
    modelled = load("modelled")
    clock, done = modelled.Clock(), []
    cores, greedy, modest = modelled.Cores(clock, 2), modelled.Thread(), modelled.Thread()
    for name, thread in (("g1", greedy), ("g2", greedy), ("g3", greedy), ("m1", modest)):
        cores.run(thread, lambda: 1.0, lambda name=name: done.append((name, clock.now)))
    run_out(clock)
    assert done == [("g1", 1.0), ("g2", 1.0), ("m1", 2.0), ("g3", 2.0)]


@each("leaving, coming, took", [(100, 100, 1.5), (300, 100, 3.5), (100, 300, 3.5)])
def test_a_crossing_takes_as_long_as_the_slower_of_both_cards(leaving: float, coming: float, took: float) -> None:
    modelled = load("modelled")
    clock, done = modelled.Clock(), []
    here, there = (modelled.Host(clock, 1, modelled.Card(100.0, 0.5)) for _ in range(2))
    here.cross(there, "lane", leaving, coming, lambda: done.append(clock.now))
    run_out(clock)
    assert done == [pytest.approx(took)]


def slow_machines() -> Any:
    """Cards so slow that this machine's speed plays no part."""
    return load("simulated").Machines(4, load("modelled").Card(bytes_per_s=1e7, latency_s=0.001))


def small_costs() -> Any:
    return load("modelled").Costs(*[1e-6, 1e-12] * 4, 1e-6, 1e-12, 1e-12, 1e-12)


@pytest.fixture
def even_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn of a node takes 0.1 ms, so that this machine's speed plays no part either."""
    monkeypatch.setattr(time, "thread_time", itertools.count(0.0, 1e-4).__next__)


@pytest.mark.usefixtures("even_turns")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_predicted_step_takes_at_least_what_the_cards_need(mode: str) -> None:
    scale, simulated, machines = load("scale"), load("simulated"), slow_machines()
    spec = load("models").parse_spec("3x1048576")
    shape = simulated.Shape(3, 2, "separate", mode)
    found = simulated.predict(shape, spec, machines, small_costs())
    bound_s = scale.bound_s(shape, spec.payload_bytes, machines.card)
    assert bound_s <= found.step_s < 2 * bound_s


@pytest.mark.usefixtures("even_turns")
def test_a_cluster_on_one_host_is_predicted_as_those_are_that_are_run_beside_predictions() -> None:
    validation, spec = load("validation"), load("models").parse_spec("3x1048576")
    found = validation.predict_here(2, spec, small_costs())
    assert found.step_s > 0 and found.processor_s["server turning"] > 0


@pytest.mark.usefixtures("even_turns")
def test_workers_that_one_stands_for_cost_a_server_as_much_as_themselves() -> None:
    simulated, machines = load("simulated"), slow_machines()
    spec = load("models").parse_spec("3x1048576")
    shape = simulated.Shape(8, 2)
    each, lumped = (simulated.predict(shape, spec, machines, small_costs(), stands_for=times) for times in (1, 2))
    assert lumped.step_s == pytest.approx(each.step_s, rel=0.25)
    assert lumped.server_messages == pytest.approx(each.server_messages, rel=0.25)
    assert lumped.processor_s["server carrying"] == pytest.approx(each.processor_s["server carrying"], rel=0.25)
    assert lumped.processor_s["worker carrying"] == pytest.approx(each.processor_s["worker carrying"] / 2, rel=0.25)


@pytest.mark.usefixtures("even_turns")
@each("way", ["quota", "quota, local steps"])
def test_unequal_workers_make_what_each_makes_alone_but_for_those_that_die(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unequal, spec = load("scale_unequal"), load("workers.workload").Spec.parse("1x16384")
    monkeypatch.setitem(unequal.HORIZON_S, way, 600.0)

    def made(dying: float) -> Any:
        return unequal.Job(6, way, spec, slow_machines(), small_costs()).run(dying)

    calm, dying = made(0.0), made(4.0)
    assert 0.97 < calm.of_all <= 1.03 and calm.deaths == 0
    assert dying.deaths >= 3 and 0.7 < dying.of_all < calm.of_all
    assert dying.of_present > 0.9


def test_a_case_that_is_run_again_replaces_its_row_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unequal = load("scale_unequal")
    monkeypatch.setattr(unequal, "RESULTS", tmp_path)
    for workers, of_all in ((1000, 0.5), (64, 0.75), (1000, 0.25)):
        unequal.write(unequal.Goodput(workers, "quota", 0.01, 5.0, 3, of_all, 1.0, 6.4, 0.1, 60.0))
    table = (tmp_path / "scale_unequal.md").read_text().splitlines()[-2:]
    assert [row.split(" | ")[0:6:5] for row in table] == [["| 64", "75.0%"], ["| 1000", "25.0%"]]


def test_the_best_configuration_is_the_winner_or_a_neighbour_with_enough_seeds() -> None:
    limping = load("limping")
    winner = dict.fromkeys(range(3), 10.0)
    few, enough = {0: 1.0, 1: 1.0}, dict.fromkeys(range(limping.BEST_SEEDS), 9.0)
    assert limping.best_of({"": winner, "batch=8": few}) == [10.0] * 3
    assert limping.best_of({"": winner, "batch=8": few, "batch=4": enough}) == [9.0] * limping.BEST_SEEDS


def test_a_speed_at_which_a_way_was_not_measured_is_left_empty() -> None:
    page = load("local_steps").page({"one": {"10": [0.5, 0.06], "50": [0.75, 0.05]}, "other": {"50": [1.0, 0.05]}})
    assert page.splitlines()[-2:] == ["| `one` | 75% | 50% |", "| `other` | 100% |  |"]


def test_workers_on_hosts_with_servers_are_not_taken_as_one() -> None:
    simulated = load("simulated")
    spec = load("models").parse_spec("3x1048576")
    with pytest.raises(ValueError, match="cannot be taken as one"):
        simulated.predict(simulated.Shape(4, 4, "colocated"), spec, slow_machines(), small_costs(), stands_for=2)


def test_a_real_step_is_compared_without_the_part_that_others_had(tmp_path: Path, monkeypatch: Any) -> None:
    validation = load("validation")
    monkeypatch.setattr(validation.os, "sched_getaffinity", lambda _: {0, 1})
    for rank, seconds in enumerate(([1.0, 2.0], [3.0, 2.0])):
        Path(tmp_path, f"{rank}.json").write_text(json.dumps(seconds))
    spent = {"server-0 carrying": 0.25, "server-1 carrying": 0.5, "worker-0 turning": 1.0, "others": 1.0}
    Path(tmp_path, "processors.json").write_text(json.dumps([spent, spent]))
    real = validation.read(tmp_path, workers=2)
    assert (real.step_s, real.own_step_s) == (2.0, 1.5)
    assert (real.processor_of("server carrying"), real.processor_of("worker turning")) == (0.75, 1.0)


@pytest.mark.parametrize(
    "options", [[], *(pytest.param([one], marks=pytest.mark.slow) for one in ("--whole", "--dense"))]
)
def test_random_rows_are_pushed_and_pulled_by_two_workers(tmp_path: Path, options: list[str]) -> None:
    sparse = load("sparse")
    work = sparse.Work(rows=50, pushed=50 if options == ["--dense"] else 20, steps=2, warmup=1)
    sparse.kvdist(work, *options)(str(tmp_path))
    assert all(len(json.loads(Path(tmp_path, f"{rank}.json").read_text())) == 2 for rank in range(2))


def test_the_tables_of_the_readme_are_what_the_committed_runs_say() -> None:
    readme = load("readme")
    text = (BENCHMARKS.parent / "README.md").read_text("utf-8")
    assert text == readme.with_tables(text)
    assert text.count("| one step | kvdist |") == text.count("| speeds of the machines | DDP |") == 1


def test_the_tables_of_the_measured_pages_are_those_of_the_committed_results() -> None:
    measured = load("measured")
    pages = {path: path.read_text("utf-8") for path in measured.PAGES.glob("*.md")}
    assert {path.name: measured.with_tables(text) == text for path, text in pages.items()} == dict.fromkeys(
        (path.name for path in pages), True
    )
    assert sum(len(measured.PLACE.findall(text)) for text in pages.values()) > 10


def stormy() -> Any:
    """Two workers that step each second; the second one is killed after three, and back four seconds later."""
    storm = load("storm")
    steady = storm.Life(0, 0, 0.0, 1.0, [(float(at), 10) for at in range(2, 13)])
    first = storm.Life(1, 0, 0.0, 1.0, [(float(at), 10) for at in (2, 3, 4)])
    second = storm.Life(1, 1, 5.0, 7.0, [(float(at), 10) for at in (9, 10, 11, 12)])
    faults = [storm.Fault("kill", "worker-1", 5.0, 0)]
    return storm.Outcome(0, faults, [steady, first, second], [], 12.0, 0.3, "")


def test_a_storm_counts_examples_returns_and_those_that_take_part() -> None:
    outcome = stormy()
    assert outcome.per_second == 18 * 10 / 10.0
    assert outcome.returns("kill") == [(4.0, 2.0)], "the imports took two of the four seconds"
    assert outcome.returns("stop") == []
    assert outcome.taking_part(1.0) == (10 + 3 + 3) / (10 + 3 + 7), "the first start of all is not counted"


@pytest.mark.slow
def test_a_short_storm_loses_no_example(tmp_path: Path) -> None:
    picture = tmp_path / "storm.png"
    words = ["--workers", "4", "--servers", "2", "--minutes", "0.25", "--calm-minutes", "0.1", "--patience", "4"]
    words += ["--faults-per-hour", "900", "--picture", str(picture)]
    command = [sys.executable, str(BENCHMARKS / "storm.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, counted twice 0" in done.stdout and " s  worker-" in done.stdout, done.stdout


def test_local_steps_of_one_machine_are_those_that_it_makes_alone() -> None:
    limping = load("limping_simulated")
    setting = limping.Setting((1.0,), exchange=0.3)
    alone, local = (
        limping.Run(limping.Config(method, 1, 16, 0.1, 0.5, quota=64), setting, split=0, seed=1)
        for method in ("alone", "quota, local steps")
    )
    for run in (alone, local):
        limping.METHODS[run.config.method](run)
    assert len(alone.looks) > 5 and alone.looks[-1] > 0.95
    assert abs(alone.reached - local.reached) < 0.3 * alone.reached
    assert abs(alone.seen - local.seen) < 0.3 * alone.seen


def test_a_death_costs_ddp_two_starts_and_a_quota_only_the_machine() -> None:
    limping = load("limping_simulated")
    setting, never = limping.SETTINGS["chronic"], (float("inf"), float("inf"))

    def left(config: Any) -> float:
        """The share of the examples that a death, from 20 to 40 units, leaves of those of 100 units."""
        seen = []
        for death in (never, (20.0, 40.0)):
            run = limping.Run(config, setting, 0, 1, give_up=100.0, death=death, target=2.0)
            limping.METHODS[config.method](run)
            seen.append(run.seen)
        return float(seen[1] / seen[0])

    assert left(limping.Config("DDP", 3, 16, 0.2, 0.5)) < 0.65
    # A machine of 1 of 2.25 is away for a fifth of the time: 0.91.
    assert 0.85 < left(limping.Config("quota, local steps", 3, 16, 0.2, 0.5, 64)) < 0.95


def test_what_is_next_to_a_winner_is_measured_once_and_differs_from_it() -> None:
    limping = load("limping")
    for method in ("DDP", "DDP, best subset", "quota", "quota, local steps"):
        winner = limping.tuned(limping.Work("graded", method, 0))
        changes = limping.neighbours("graded", method)
        configs = [limping.tuned(limping.Work("graded", method, 0, changes=one)) for one in changes]
        assert len({str(config) for config in (winner, *configs)}) == 1 + len(configs) >= 5
        for key in ("learning_rate", "quota" if winner["quota"] else "batch"):
            rest = {name: value for name, value in winner.items() if name != key}
            apart = [config[key] / winner[key] for config in configs if {**rest, key: config[key]} == config]
            assert {0.5, 2.0} <= {round(one, 3) for one in apart}, (method, key)
