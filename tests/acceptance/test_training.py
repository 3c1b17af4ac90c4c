"""Training with torch: what a run that goes on makes of its data, clipping, and the state of `as_torch_optimizer()`."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.processes import Job, Process

EPOCHS, EXAMPLES, BATCH = 3, 128, 8

RESUME = f"""
    import json, sys
    from pathlib import Path

    import torch
    from kvdist import NoCheckpoint, SplitSampler, Trainer, kv

    run, stop, num_workers, passes = sys.argv[1], *map(int, sys.argv[2:])
    store = kv.create("dist")
    net = torch.nn.Linear(1, 1)
    trainer = Trainer(net.parameters(), "sgd", {{"learning_rate": 0.0}}, kvstore=store)
    x = torch.arange({EXAMPLES}, dtype=torch.float32).reshape(-1, 1)
    data = torch.utils.data.TensorDataset(x, x)
    sampler = SplitSampler(len(data), store.num_workers, store.rank, seed=0)
    loader = torch.utils.data.DataLoader(
        data, {BATCH}, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    step, used = 0, []
    try:
        checkpoint = trainer.load_checkpoint("checkpoints")
        step = checkpoint.step
        sampler.load_state_dict(checkpoint.states)
    except NoCheckpoint:
        pass
    net.zero_grad()
    for epoch in range(sampler.epoch, {EPOCHS}):
        pending = []
        for number, (inputs, targets) in enumerate(trainer.batches(loader), 1):
            (net(inputs) - targets).square().mean().backward()
            pending += inputs.flatten().int().tolist()
            if number % passes:
                continue
            trainer.step()
            net.zero_grad()
            step += 1
            used.append((epoch, pending))
            pending = []
            if step == stop:
                trainer.save_checkpoint("checkpoints", step, state=sampler.state_dict()).result()
                break
        if step == stop:
            break
    Path(f"{{run}}-{{store.rank}}.json").write_text(json.dumps([step, used]))
    store.close()
"""


def run_of(folder: Path, run: str, ranks: int) -> tuple[set[int], Counter[tuple[int, int]]]:
    """The last steps of all ranks, and how often each (epoch, example) was in a step."""
    found = [json.loads((folder / f"{run}-{rank}.json").read_text()) for rank in range(ranks)]
    used = Counter((epoch, example) for _, steps in found for epoch, batch in steps for example in batch)
    return {step for step, _ in found}, used


def forget_what_torch_leaves(job: Job) -> None:
    """Sockets of its loaders' processes, and a cache that `torch.optim` makes."""
    for left in (*job.folder.glob("pymp-*"), *job.folder.glob("torchinductor_*")):
        shutil.rmtree(left)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("passes", [2, 1])
def test_a_run_that_goes_on_uses_each_example_of_each_epoch_once(job, script, tmp_path, monkeypatch, passes):
    monkeypatch.chdir(tmp_path)
    path, per_epoch = script(RESUME), EXAMPLES // BATCH // 2 // passes
    stop = per_epoch + 2
    for run, last in (("first", stop), ("second", 10**6)):
        job.launch(2, 2, path, run, str(last), "2", str(passes))
        job.succeed()
    forget_what_torch_leaves(job)
    steps, used = run_of(tmp_path, "first", 2)
    later_steps, later = run_of(tmp_path, "second", 2)
    assert steps == {stop}
    assert later_steps == {EPOCHS * per_epoch}
    every = {(epoch, example) for epoch in range(EPOCHS) for example in range(EXAMPLES)}
    assert used + later == Counter(every)


PLAIN = f"""
    import sys

    import torch
    from kvdist import SplitSampler, Trainer, kv

    store = kv.create("dist")
    net = torch.nn.Linear(1, 1)
    trainer = Trainer(net.parameters(), "sgd", kvstore=store)
    x = torch.arange({EXAMPLES}, dtype=torch.float32).reshape(-1, 1)
    sampler = SplitSampler(len(x), store.num_workers, store.rank, seed=0)
    loader = torch.utils.data.DataLoader(x, {BATCH}, sampler=sampler, num_workers=int(sys.argv[1]))
    for inputs in loader:
        net.zero_grad()
        net(inputs).mean().backward()
        trainer.step()
        try:
            print("saved", sampler.state_dict()["visited"])
        except RuntimeError as error:
            print("refused:", error)
        break
    store.close()
"""


def test_the_position_of_a_plain_loader_is_refused_where_its_processes_read_ahead(job, script):
    path = script(PLAIN)
    launcher = job.launch(1, 1, path, "2")
    job.succeed()
    assert launcher.lines_with("refused:") and "trainer.batches(loader)" in launcher.text, job.transcript()
    launcher = job.launch(1, 1, path, "0")
    job.succeed()
    assert launcher.lines_with(f"saved {BATCH}"), job.transcript()
    forget_what_torch_leaves(job)


CLIP = """
    import copy

    import torch
    from kvdist import Trainer, kv

    torch.manual_seed(0)
    begun = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    batches = [[torch.randn(4, 8) * 4 ** (step % 3) for rank in range(2)] for step in range(8)]

    def loss(net, inputs):
        return (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    reference = copy.deepcopy(begun)
    optimizer = torch.optim.SGD(reference.parameters(), 0.05, momentum=0.9)
    norms = []
    for both in batches:  # what DistributedDataParallel does: the mean gradient, clipped, on equal weights
        optimizer.zero_grad()
        (sum(loss(reference, inputs) for inputs in both) / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 5.0)))
        optimizer.step()
    assert min(norms) < 5.0 < max(norms), norms

    stores = [kv.create(name) for name in ("dist", "collective")]
    for store in stores:
        net = copy.deepcopy(begun)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, store, clip_norm=5.0)
        for both, norm in zip(batches, norms):
            net.zero_grad()
            loss(net, both[store.rank]).backward()
            trainer.step()
            assert abs(trainer.grad_norm - norm) < 1e-5 * norm, (trainer.grad_norm, norm)
        worst = max(float((a - b).abs().max()) for a, b in zip(net.parameters(), reference.parameters()))
        assert worst < 1e-6, worst
        print("clipped like torch on", store.rank, store.type)
    for store in stores:
        store.close()
"""


def test_clip_norm_clips_the_gradient_that_ddp_clips(job, script):
    launcher = job.launch(2, 2, script(CLIP))
    job.succeed()
    forget_what_torch_leaves(job)
    assert len(launcher.lines_with("clipped like torch on")) == 4, job.transcript()


STATES_S = 250.0
"""For each of two jobs whose workers import all of torch's optimizers, which takes a minute beside other tests."""

STATES = """
    import hashlib, sys

    import torch
    from kvdist import InitMismatch, Trainer, kv

    RUNS = [("adam", {}, None), ("sgd", {"momentum": 0.9}, None), ("adamw", {}, False), ("torch.nadam", {}, None)]
    STOP, STEPS = 3, 6
    what = sys.argv[1]
    runs = RUNS + RUNS[:1] * (what == "later")  # once more, where rank 0 alone loads
    stores = [kv.create("dist") for _ in runs]
    for number, (store, (rule, numbers, update_on_kvstore)) in enumerate(zip(stores, runs)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 1))
        numbers = {"lr" if "torch" in rule else "learning_rate": 0.01, **numbers}
        trainer = Trainer(net.parameters(), rule, numbers, store, None, update_on_kvstore)
        optimizer = trainer.as_torch_optimizer()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        file, begin = f"{rule}.pt", 0
        if what == "later" and (number < len(RUNS) or store.rank == 0):
            saved = torch.load(file)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            begin = STOP
        try:
            for step in range(begin, STEPS):
                optimizer.zero_grad()
                inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + store.rank))
                net(inputs).square().mean().backward()
                optimizer.step()
                schedule.step()
                if what == "whole" and step + 1 == STOP and store.rank == 0:  # as most programs save
                    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**saved, "schedule": schedule.state_dict()}, file)
        except InitMismatch as error:
            print("refused:", error)
            continue
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in net.parameters())).hexdigest()
        state = optimizer.state_dict()["state"]
        print("came to", rule, digest, sorted(state), sorted(state[0]), float(state[0]["step"]))
    for store in stores:
        store.close()
"""


@pytest.mark.timeout(2 * STATES_S + 20)
def test_the_state_of_the_torch_optimizer_goes_on_with_the_same_bits_and_only_on_all_workers(
    job, script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path, pieces = script(STATES), {"KVDIST_SLICE_BYTES": "1024", "MXNET_KVSTORE_BIGARRAY_BOUND": "500"}
    launcher = job.launch(2, 2, path, "whole", **pieces)
    job.succeed(STATES_S)
    expected = came_to(launcher)
    assert len(expected) == 4, job.transcript()
    assert "['exp_avg', 'exp_avg_sq', 'step'] 6.0" in launcher.text
    assert "['momentum_buffer', 'step'] 6.0" in launcher.text
    launcher = job.launch(2, 3, path, "later", **pieces)
    job.succeed(STATES_S)
    forget_what_torch_leaves(job)
    assert came_to(launcher) == expected, job.transcript()
    assert len(launcher.lines_with("refused:")) == 2, job.transcript()
    assert launcher.lines_with("goes on from the optimizer state"), job.transcript()


def came_to(launcher: Process) -> list[str]:
    """What all workers of a job say in the same words, each once."""
    return sorted({line.partition("│ ")[2] for line in launcher.lines_with("came to")})
