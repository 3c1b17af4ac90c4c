"""Training with torch: what a run that goes on makes of its data, clipping, and the state of `as_torch_optimizer()`."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.processes import Job

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


def forget_sockets_of_loaders(job: Job) -> None:
    """The processes of torch's loaders leave these folders behind, in every job."""
    for left in job.folder.glob("pymp-*"):
        shutil.rmtree(left)


@pytest.mark.parametrize(("num_workers", "passes", "ranks_later"), [(2, 2, 2), (2, 1, 1)])
def test_a_run_that_goes_on_uses_each_example_of_each_epoch_once(
    job, script, tmp_path, monkeypatch, num_workers, passes, ranks_later
):
    monkeypatch.chdir(tmp_path)
    path, per_epoch = script(RESUME), EXAMPLES // BATCH // 2 // passes
    stop = per_epoch + 2
    for run, ranks, last in (("first", 2, stop), ("second", ranks_later, 10**6)):
        words = [run, str(last), str(num_workers), str(passes)]
        job.launch(ranks, 2, path, *words)
        job.succeed()
    forget_sockets_of_loaders(job)
    steps, used = run_of(tmp_path, "first", 2)
    later_steps, later = run_of(tmp_path, "second", ranks_later)
    assert steps == {stop}
    if ranks_later == 2:
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
    forget_sockets_of_loaders(job)


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


def test_clip_norm_clips_the_gradient_that_ddp_clips(job, script, tmp_path):
    launcher = job.launch(2, 2, script(CLIP), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))  # torch.optim makes that folder
    job.succeed()
    assert len(launcher.lines_with("clipped like torch on")) == 4, job.transcript()
