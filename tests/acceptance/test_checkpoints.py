"""Checkpoints that cannot be made, or not by this job: every rank hears of it, and nothing is mixed or left behind."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def stores(*quick: str, of: str = "local dist dist_async collective hybrid") -> pytest.MarkDecorator:
    """A test for every kind of store; all but the quick ones are left out of the quick suite."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "kind", [kind if kind in quick else pytest.param(kind, marks=slow) for kind in of.split()]
    )


TRAIN = """
    import sys, time
    from pathlib import Path
    import numpy as np
    from kvdist import CheckpointError, NoCheckpoint, PeerLostError, RowSparse, kv

    kind, folder, *more = sys.argv[1:]
    store = kv.create(kind)
    if kind != "collective":
        store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", np.zeros(1000, np.float32))
    if kind == "hybrid":
        store.init("rows", RowSparse(np.arange(10), np.zeros((10, 4), np.float32)))

    def step():
        store.push("w", np.ones(1000, np.float32))

    def wait_for(path):
        for _ in range(2000):
            if Path(path).exists():
                return
            time.sleep(0.05)
        raise SystemExit(f"{path} did not come")
"""


@pytest.fixture
def run(job, script, tmp_path):
    """``run(kind, program, *arguments)`` launches a program of two workers, whose root is `tmp_path`."""

    def start(kind: str, program: str, *arguments: object, name: str = "launcher", **variables: str):
        path = script(TRAIN + program, f"{name}.py")
        variables = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), **variables}
        words = [path, kind, *map(str, arguments)]
        if kind == "local":
            return job.start(name, [sys.executable, *words], **variables)
        servers = "0" if kind == "collective" else "2"
        launcher = [sys.executable, "-m", "kvdist_launch", "-n", "2", "-s", servers, "--", sys.executable]
        return job.start(name, [*launcher, *words], **variables)

    return start


def ranks(kind: str) -> int:
    return 1 if kind == "local" else 2


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(autouse=True)
def forks(popen, monkeypatch):
    """`subprocess.run` forks, too."""
    monkeypatch.setattr(subprocess, "Popen", popen)


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvdist", "checkpoints", str(folder), "--verify"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


FIRST = """
    try:
        store.save_checkpoint(folder, 1, state={"rank": store.rank})
    except CheckpointError as error:
        print("refused:", error)
    store.close()
"""


@stores("dist", of="dist dist_async hybrid")
def test_a_folder_outside_the_root_is_refused_on_every_rank_by_the_first_call(job, run, tmp_path, kind):
    root, outside = tmp_path / "root", tmp_path / "data" / "x"
    launcher = run(kind, FIRST, outside, KVDIST_CHECKPOINT_ROOT=str(root))
    job.succeed()
    refused = launcher.lines_with("refused:")
    assert len(refused) == 2, job.transcript()
    for line in refused:
        assert str(outside) in line and str(root) in line and "KVDIST_CHECKPOINT_ROOT" in line
    assert not outside.exists() or not files_below(outside)


@stores("local", "dist")
def test_what_cannot_be_a_folder_is_refused_on_every_rank_by_the_first_call(job, run, tmp_path, kind):
    (tmp_path / "x").write_text("a file")
    launcher = run(kind, FIRST, tmp_path / "x")
    job.succeed()
    refused = launcher.lines_with("refused:")
    assert len(refused) == ranks(kind), job.transcript()
    assert any(str(tmp_path / "x") in line and "Not a directory" in line for line in refused)
    assert (tmp_path / "x").read_text() == "a file"


@stores("local", of="local dist")
def test_a_first_save_that_is_refused_ends_a_program_that_does_not_catch_it(job, run, tmp_path, kind):
    (tmp_path / "x").write_text("a file")
    run(kind, "\n    store.save_checkpoint(folder, 1)\n    print('went on')\n", tmp_path / "x")
    assert job.finish()["launcher"] == 1
    assert not job.processes["launcher"].lines_with("went on")


ENDS = {
    "close": "store.close()",
    "without closing": "pass",
    "with": "with store: step()",
}
LAST = """
    step()
    store.save_checkpoint(folder, 1).result()
    step()
    store.save_checkpoint(folder, 2)
    {end}
    print("went on to the end")
"""


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        pytest.param(kind, end, marks=() if kind in ("local", "dist") and end != "with" else pytest.mark.slow)
        for kind in ("local", "dist", "dist_async", "collective", "hybrid")
        for end in ENDS
    ],
)
def test_a_last_save_that_fails_is_an_exit_code(job, run, tmp_path, kind, end):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "step-2").write_text("no folder")  # so that the second save cannot be made
    launcher = run(kind, LAST.format(end=ENDS[end]), folder)
    assert job.finish()["launcher"] == 1, job.transcript()
    assert launcher.lines_with("Not a directory")
    assert bool(launcher.lines_with("went on to the end")) is (end == "without closing")
    assert "intact" in verify(folder).stdout
    assert set(os.listdir(folder)) == {"step-1", "step-2"} | ({"workers"} if kind == "hybrid" else set())
    assert (folder / "step-2").read_text() == "no folder"
    assert not [name for name in files_below(folder) if name.endswith((".part", "lock.json"))]


@stores("dist")
def test_a_program_that_looks_at_the_failure_ends_well(job, run, tmp_path, kind):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "step-2").write_text("no folder")
    launcher = run(
        kind,
        """
    step()
    try:
        store.save_checkpoint(folder, 2).result()
    except CheckpointError as error:
        print("caught", error)
    store.save_checkpoint(folder, 3)
    store.close()
""",
        folder,
    )
    job.succeed()
    assert len(launcher.lines_with("caught")) == ranks(kind)
    assert "step-3" in verify(folder).stdout


@stores("local", "dist")
def test_a_save_in_between_that_fails_is_raised_by_the_next_one(job, run, tmp_path, kind):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "step-2").write_text("no folder")
    launcher = run(
        kind,
        """
    store.save_checkpoint(folder, 1).result()
    store.save_checkpoint(folder, 2)
    step()
    try:
        store.save_checkpoint(folder, 3)
    except CheckpointError as error:
        print("raised by the next:", error)
    store.save_checkpoint(folder, 4)
    store.close()
""",
        folder,
    )
    job.succeed()
    assert len(launcher.lines_with("raised by the next")) == ranks(kind), job.transcript()
    assert any("step-2" in line for line in launcher.lines_with("raised by the next"))
    assert not (folder / "step-3").exists() and (folder / "step-4" / "manifest.json").is_file()


ENDINGS = {
    "a block left by sys.exit(0)": ("with store:\n        fail(); sys.exit(0)", 1),
    "a block and a caught error": ("try:\n        with store: fail(); 1 / 0\n    except ArithmeticError: pass", 1),
    "an uncaught error": ("with store: fail(); raise KeyError('own')", 1),
    "sys.exit(75)": ("fail(); sys.exit(75)", 75),
    "sys.exit(75) in a function and a block": ("def main():\n        fail(); sys.exit(75)\n    with store: main()", 75),
    "sys.exit(0)": ("fail(); sys.exit(0)", 1),
    "sys.exit with a sentence": ("fail(); sys.exit('a sentence')", 1),
    "sys.exit(256), which is 0": ("fail(); sys.exit(256)", 1),
    "sys.exit(75) that was caught": ("fail()\n    try: sys.exit(75)\n    except SystemExit: pass\n    x = 1", 1),
}


@pytest.mark.parametrize(("end", "code"), ENDINGS.values(), ids=ENDINGS)
def test_a_failed_save_replaces_only_an_exit_code_of_0(run, job, tmp_path, end, code):
    (tmp_path / "step-2").write_text("no folder")
    run("local", f"\n    def fail(): store.save_checkpoint(folder, 2)\n    {end}\n", tmp_path)
    assert job.finish()["launcher"] == code, job.transcript()


def test_a_failed_save_leaves_every_exit_handler_its_call_and_files_what_was_written(job, script, tmp_path):
    (tmp_path / "step-2").write_text("no folder")
    program = script(
        """
        import atexit, sys
        atexit.register(print, "registered before")
        import numpy as np
        from kvdist import kv
        store = kv.create("local")
        store.init("w", np.zeros(3))
        def after(): print("registered after")
        atexit.register(after)
        store.save_checkpoint(sys.argv[1], 2)
        results = open(sys.argv[1] + "/results", "w")
        results.write("written, not flushed")
        """
    )
    launcher = job.start("launcher", [sys.executable, program, str(tmp_path)], KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    assert job.finish()["launcher"] == 1
    assert (tmp_path / "results").read_text() == "written, not flushed"
    assert len(launcher.lines_with("registered after")) == len(launcher.lines_with("registered before")) == 1


LOSES_ITS_CLUSTER = """
    store.save_checkpoint(folder, 1).result()
    print("saved")
    if store.rank == 1:
        wait_for("/never")  # takes part in no other checkpoint, so that the next one is never complete
    future = store.save_checkpoint(folder, 2)
    print("saving")
    while not future.done():
        time.sleep(0.01)
    try:
        {call}
    except PeerLostError as error:
        print("heard:", error)
    print("went on to the end")
"""


@pytest.mark.parametrize(("call", "code"), [("pass", 75), ("store.barrier()", 0)], ids=["no call", "a call"])
def test_a_save_that_fails_as_the_cluster_is_lost_is_an_exit_code_unless_a_call_has_raised_it(
    job, script, tmp_path, call, code
):
    program = script(TRAIN + LOSES_ITS_CLUSTER.format(call=call))
    folder = tmp_path / "x"
    words = [sys.executable, program, "dist", str(folder)]
    job.cluster(2, 1, *words, KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.line("worker-0", "saving")
    job.line("worker-1", "saved")
    job.kill("server-0")
    job.finish(but="worker-1")
    job.kill("worker-1")
    assert job.finish()["worker-0"] == code, job.transcript()
    worker = job.processes["worker-0"]
    assert worker.lines_with("went on to the end"), job.transcript()
    assert bool(worker.lines_with("heard:")) is not bool(worker.lines_with("the last checkpoint"))


def test_a_trainer_whose_workers_update_tells_of_its_last_save_when_it_is_closed(job, script, tmp_path):
    (tmp_path / "step-2").write_text("no folder")
    program = script(
        """
        import os, sys, torch
        from kvdist import CheckpointError, Trainer
        net = torch.nn.Linear(3, 1)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=None)
        net(torch.ones(1, 3)).sum().backward()
        trainer.step()
        trainer.save_checkpoint(sys.argv[1], 1).result()
        trainer.save_checkpoint(sys.argv[1], 2)
        try:
            trainer.close()
        except CheckpointError as error:
            print("told:", error, os.path.exists(os.path.join(sys.argv[1], "lock.json")))
        """
    )
    launcher = job.start("launcher", [sys.executable, program, str(tmp_path)], KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    assert job.finish()["launcher"] == 0, job.transcript()
    assert [line.endswith("False") for line in launcher.lines_with("told:")] == [True]


@stores("local", "dist", of="local dist collective hybrid")
def test_a_trainer_whose_workers_update_tells_of_its_last_save_when_its_store_is_closed(job, script, tmp_path, kind):
    (tmp_path / "step-2").write_text("no folder")
    program = script(
        """
        import os, sys, torch
        from kvdist import CheckpointError, Trainer, kv
        net = torch.nn.Linear(3, 1)
        store = kv.create(sys.argv[2])
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=False)
        net(torch.ones(1, 3)).sum().backward()
        trainer.step()
        trainer.save_checkpoint(sys.argv[1], 1).result()
        trainer.save_checkpoint(sys.argv[1], 2)
        try:
            store.close()
        except CheckpointError as error:
            print("told:", error, "step-2" in str(error))
        if store.rank == 0:
            print("locked:", os.path.exists(os.path.join(sys.argv[1], "lock.json")))
        trainer.close()
        """
    )
    variables = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    if kind == "local":
        launcher = job.start("launcher", [sys.executable, program, str(tmp_path), kind], **variables)
    else:
        servers = 0 if kind == "collective" else 1
        launcher = job.launch(2, servers, sys.executable, program, str(tmp_path), kind, **variables)
    assert job.finish()["launcher"] == 0, job.transcript()
    assert [line.endswith("True") for line in launcher.lines_with("told:")] == [True] * ranks(kind), job.transcript()
    assert [line.endswith("False") for line in launcher.lines_with("locked:")] == [True], job.transcript()


def test_a_trainer_whose_workers_update_ends_with_an_error_too(job, script, tmp_path):
    (tmp_path / "step-2").write_text("no folder")
    program = script(
        """
        import sys, torch
        from kvdist import Trainer, kv
        net = torch.nn.Linear(3, 1)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore="dist", update_on_kvstore=False)
        net(torch.ones(1, 3)).sum().backward()
        trainer.step()
        trainer.save_checkpoint(sys.argv[1], 1).result()
        trainer.save_checkpoint(sys.argv[1], 2)
        print(f"rank {trainer.kvstore.rank} went on to the end")
        """
    )
    launcher = job.launch(2, 1, sys.executable, program, str(tmp_path), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    assert job.finish()["launcher"] == 1
    assert all(launcher.lines_with(f"rank {rank} went on to the end") for rank in (0, 1))
    assert (tmp_path / "step-1" / "manifest.json").is_file()


HOLD = """
    store.save_checkpoint(folder, 1).result()
    print("saved")
    wait_for(more[0])
    step()
    store.save_checkpoint(folder, 2)
    store.close()
"""


def test_a_second_job_is_refused_by_its_first_save(job, run, tmp_path):
    folder, gate = tmp_path / "x", tmp_path / "gate"
    run("dist", HOLD, folder, gate)
    job.line("launcher", "saved", count=2)
    before = files_below(folder)
    for kind in ("dist", "local"):
        second = run(kind, FIRST, folder, name=kind)
        job.wait(lambda: second.code is not None, "the second job ends")  # noqa: B023
        refused = second.lines_with("refused:")
        assert len(refused) == ranks(kind), job.transcript()
        for line in refused:
            assert "another job saves into" in line and str(folder) in line and os.uname().nodename in line
            assert f"process {job.pid_of('scheduler')} " in line
        assert files_below(folder) == before
    gate.touch()
    assert job.finish()["launcher"] == 0, job.transcript()
    assert verify(folder).stdout.count("intact") == 2
    assert not (folder / "lock.json").exists()


RESUME = """
    try:
        checkpoint = store.load_checkpoint(folder)
        print("goes on from", checkpoint.step)
        at = checkpoint.step
    except NoCheckpoint:
        at = 0
    step()
    store.save_checkpoint(folder, at + 1).result()
    print("saved")
    if more:
        wait_for(more[0])
    store.close()
"""


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("dist", "scheduler"),
        pytest.param("dist", "launcher", marks=pytest.mark.slow),
        pytest.param("collective", "launcher", marks=pytest.mark.slow),
        pytest.param("collective", "worker-0", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_in_the_folder_of_one_that_was_killed(job, run, tmp_path, kind, victim):
    folder = tmp_path / "x"
    run(kind, RESUME, folder, tmp_path / "never")
    job.line("launcher", "saved", count=2)
    children = job.children().values()
    job.kill(victim, signal.SIGKILL)
    assert job.finish()["launcher"] != 0
    for pid in children:
        for _ in range(600):
            if not Path(f"/proc/{pid}").exists():
                break
            time.sleep(0.05)
    second = run(kind, RESUME, folder, name="second")
    job.wait(lambda: second.code is not None, "the second job ends")
    assert second.code == 0 and len(second.lines_with("goes on from 1")) == 2, job.transcript()
    assert verify(folder).stdout.count("intact") == 2


def test_a_job_that_the_launcher_starts_again_saves_into_its_folder(job, script, tmp_path):
    program = script(
        TRAIN
        + """
    import os, signal
    try:
        at = store.load_checkpoint(folder).step
    except NoCheckpoint:
        at = 0
    step()
    store.save_checkpoint(folder, at + 1).result()
    store.barrier()
    if at == 0 and store.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
    store.barrier()
    store.close()
    print("came to", at + 1)
"""
    )
    options = ["--on-worker-exit", "restart:1"]
    variables = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    launcher = job.launch(2, 2, sys.executable, program, "dist", str(tmp_path / "x"), options=options, **variables)
    assert job.finish()["launcher"] == 0, job.transcript()
    assert len(launcher.lines_with("came to 2")) == 2


def test_a_lock_of_another_host_is_not_taken_over(job, run, tmp_path):
    folder, gate = tmp_path / "x", tmp_path / "gate"
    run("local", HOLD, folder, gate)
    job.line("launcher", "saved")
    lock = json.loads((folder / "lock.json").read_text())
    assert lock["host"] == os.uname().nodename and lock["pid"] == job.pid_of("launcher")
    gate.touch()
    assert job.finish()["launcher"] == 0
    (folder / "lock.json").write_text(json.dumps({**lock, "host": "node17", "boot": "of another kernel"}))
    second = run("dist", FIRST, folder, name="second")
    job.wait(lambda: second.code is not None, "the second job ends")
    refused = second.lines_with("refused:")
    assert len(refused) == 2 and all("node17" in line and f"remove {folder}/lock.json" in line for line in refused)
    (folder / "lock.json").unlink()
    third = run("dist", FIRST, folder, name="third")
    job.wait(lambda: third.code is not None, "the third job ends")
    assert third.code == 0 and not third.lines_with("refused:")


AGAIN = """
    try:
        store.save_checkpoint(folder, 1)
    except CheckpointError as error:
        print("refused:", error)
    store.barrier()
    if store.rank == 0:
        (Path(folder) / "lock.json").unlink()
    store.barrier()
    store.save_checkpoint(folder, 2).result()
    store.close()
"""


@stores("dist", of="dist hybrid")
def test_a_store_that_was_refused_saves_when_the_cause_is_gone(job, run, tmp_path, kind):
    folder = tmp_path / "x"
    folder.mkdir()
    said = {"format": "kvdist lock", "host": "node17", "boot": "of another kernel", "pid": 17, "run": "0" * 16}
    (folder / "lock.json").write_text(json.dumps(said))
    launcher = run(kind, AGAIN, folder)
    job.succeed()
    refused = launcher.lines_with("refused:")
    assert len(refused) == 2 and all("node17" in line for line in refused)
    assert "step-2" in verify(folder).stdout and not (folder / "step-1").exists()


@pytest.mark.slow_cases("collective-launcher")
@pytest.mark.parametrize(
    ("kind", "victim"), [("dist", "scheduler"), ("collective", "worker-0"), ("collective", "launcher"), ("local", "")]
)
def test_an_owner_of_a_lock_that_is_terminated_lets_other_hosts_save(job, run, tmp_path, kind, victim):
    folder = tmp_path / "x"
    launcher = run(kind, RESUME, folder, tmp_path / "never")
    job.line("launcher", "saved", count=ranks(kind))
    assert (folder / "lock.json").exists()
    job.kill(victim or "launcher", signal.SIGTERM)
    code = job.finish()["launcher"]
    if kind == "local":
        assert code == -signal.SIGTERM, "it was killed by the signal, as ever"
    else:
        assert code == 128 + signal.SIGTERM and launcher.lines_with("SIGTERM"), job.transcript()
    assert not (folder / "lock.json").exists()


def signed(manifest: dict) -> str:
    """A manifest with the checksum that the documentation says: of the JSON of all else, with sorted keys."""
    inner = json.dumps({name: value for name, value in manifest.items() if name != "sha256"}, sort_keys=True)
    digest = hashlib.sha256(inner.encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, sort_keys=True, indent=1) + "\n"


SAVE = """
    step()
    store.save_checkpoint(folder, int(more[0]), state={"of": more[0]})
    store.close()
"""


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("server-0", "7"),
        pytest.param("server-0", "8", marks=pytest.mark.slow),
        pytest.param("worker-0", "7", marks=pytest.mark.slow),
    ],
)
def test_parts_of_two_checkpoints_are_found(job, run, tmp_path, part, step):
    for name, number in (("a", "7"), ("b", step)):
        process = run("dist", SAVE, tmp_path / name, number, name=name)
        job.wait(lambda: process.code is not None, "the job ends")  # noqa: B023
        assert process.code == 0
    ours, theirs = (tmp_path / name / f"step-{number}" for name, number in (("a", "7"), ("b", step)))
    manifest, other = (json.loads((folder / "manifest.json").read_text()) for folder in (ours, theirs))
    assert (ours / "manifest.json").read_text() == signed(manifest), "this test writes manifests as kvdist does"
    assert manifest["run"] != other["run"]
    (foreign,) = [file for file in other["files"] if file["name"].startswith(part)]
    manifest["files"] = [file for file in manifest["files"] if not file["name"].startswith(part)] + [foreign]
    (ours / foreign["name"]).write_bytes((theirs / foreign["name"]).read_bytes())
    (ours / "manifest.json").write_text(signed(manifest))
    found = verify(tmp_path / "a")
    assert found.returncode == 1 and "does not belong to this checkpoint" in found.stdout, found.stdout
    assert other["run"] in found.stdout
    assert verify(tmp_path / "b").returncode == 0


PIPES = """
    future = store.save_checkpoint(folder, 1)
    try:
        future.result(60)
    except CheckpointError as error:
        print("no checkpoint:", error)
    store.save_checkpoint(folder, 2).result()
    store.close()
"""


@stores("local", "dist")
def test_a_named_pipe_called_manifest_json_holds_nobody_up(job, run, tmp_path, kind):
    (tmp_path / "x" / "step-1").mkdir(parents=True)
    os.mkfifo(tmp_path / "x" / "step-1" / "manifest.json")
    if kind == "hybrid":
        (tmp_path / "x" / "workers" / "step-1").mkdir(parents=True)
    launcher = run(kind, PIPES, tmp_path / "x")
    job.succeed()
    assert len(launcher.lines_with("no checkpoint:")) == ranks(kind), job.transcript()
    assert launcher.lines_with("manifest.json is not a regular file")
    assert "step-1           damaged" in verify(tmp_path / "x").stdout


LOAD = """
    for step in map(int, more):
        try:
            store.load_checkpoint(folder, step)
            print("loaded", step)
        except CheckpointError as error:
            print("refused", step, error)
    store.close()
"""


@stores("local", of="local dist")
def test_only_regular_files_of_the_folder_are_read(job, run, tmp_path, kind):
    process = run(kind, SAVE, tmp_path / "x", "7")
    assert job.finish()["launcher"] == 0, process.text
    broken = dict(enumerate(itertools.product(("server", "worker", "manifest"), ("link", "pipe")), start=10))
    for step, (part, what) in broken.items():
        folder = shutil.copytree(tmp_path / "x" / "step-7", tmp_path / "x" / f"step-{step}")
        (path, *_) = sorted(folder.glob(f"{part}*"))
        path.rename(tmp_path / f"outside-{step}")
        if what == "link":
            path.symlink_to(tmp_path / f"outside-{step}")
        else:
            os.mkfifo(path)
    second = run(kind, LOAD, tmp_path / "x", 7, *broken, name="second")
    job.wait(lambda: second.code is not None, "the second job ends")
    assert second.code == 0
    assert len(second.lines_with("loaded ")) == len(second.lines_with("loaded 7")) == ranks(kind), job.transcript()
    said = verify(tmp_path / "x").stdout.splitlines()
    for step, (part, what) in broken.items():
        assert len(second.lines_with(f"refused {step} ")) == ranks(kind), (part, what, job.transcript())
        assert any(line.startswith(f"step-{step} ") and "intact" not in line for line in said), (part, what, said)
    assert any(line.startswith("step-7 ") and "intact" in line for line in said), said
