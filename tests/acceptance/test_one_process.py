"""Training on several workers equals training in one process with the whole batch, and `Trainer.join` equals torch's.

The oracle is torch itself: a loop in one process, and DistributedDataParallel with its ``join``. Every run clips by the
global norm or does not, accumulates two passes, follows a cosine with a warm-up, reads its examples by
worker processes of a DataLoader, and has batches that do not divide evenly, at the end of an epoch and over workers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kvdist
from kvdist import Trainer, kv
from tests.acceptance.together import Together, same
from tests.collective.ranks import returned, run_ranks

two = Together(2, 2)
four = Together(4, 2)

STEPS, WARM, EPOCHS = 15, 5, 3
EXAMPLES, PASS, PASSES = 79, 8, 2
"""Five steps an epoch. The last pass has 7 examples: 4 and 3 for two workers; 2, 2, 2 and 1 for four."""
CLIP = 0.4
RATE = 0.05
WITHIN = 1e-6


def network():
    generator = torch.Generator().manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return net


@functools.cache
def examples():
    inputs = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(6))
    return torch.utils.data.TensorDataset(inputs, inputs.square().mean(1, keepdim=True))


def passes():
    """The examples of each pass of an epoch, over all workers."""
    return [list(range(begin, min(begin + PASS, EXAMPLES))) for begin in range(0, EXAMPLES, PASS)]


def rate_at(step):
    return RATE * min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def batches(rank, size):
    """For each step of all epochs its passes: this worker's examples, and how many there are in the step in all."""
    own = [share[rank::size] for share in passes()]
    loader = torch.utils.data.DataLoader(
        examples(), batch_sampler=own, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for _ in range(EPOCHS):
        loaded = list(loader)
        for first in range(0, len(own), PASSES):
            total = sum(len(share) for share in passes()[first : first + PASSES])
            yield loaded[first : first + PASSES], total


def summed_loss(net, batch):
    inputs, targets = batch
    return (net(inputs) - targets).square().sum()


def losses(net, step, rank=0, size=1):
    """Run `step` for each batch; the mean loss of all examples after each, and the weights at the end."""
    found = []
    for number, (parts, total) in enumerate(batches(rank, size)):
        net.zero_grad()
        step(number, parts, total)
        with torch.no_grad():
            found.append(float(summed_loss(net, examples()[:]) / EXAMPLES))
    return found, torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


SGD = {"lr": RATE, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"lr": RATE, "betas": (0.8, 0.95), "weight_decay": 0.05}
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": RATE, "wd": 0.01}, lambda own: torch.optim.SGD(own, lr=RATE, weight_decay=0.01)),
    "torch.sgd": ("torch.sgd", SGD, lambda own: torch.optim.SGD(own, **SGD)),
    "torch.adamw": ("torch.adamw", ADAMW, lambda own: torch.optim.AdamW(own, **ADAMW)),
}
"""Ours by name, with its numbers, and torch's. `sgd` without momentum is torch's."""
REFUSED = {
    "adafactor": lambda own: torch.optim.Adafactor(own, lr=RATE, weight_decay=0.01),
    "asgd": lambda own: torch.optim.ASGD(own, lr=RATE, t0=10),
}
"""What a Trainer does not take: it makes the mean of the gradients, and the optimizer updates on each worker."""


@functools.cache
def in_one_process(optimizer, clip):
    net = network()
    theirs = (REFUSED.get(optimizer) or OPTIMIZERS[optimizer][2])(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: rate_at(step) / RATE)

    def step(number, parts, total):
        for part in parts:
            (summed_loss(net, part) / total).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        theirs.step()
        schedule.step()

    return losses(net, step)


def compare(found, optimizer, clip):
    for got, wanted in zip(found, in_one_process(optimizer, clip), strict=True):
        same(got, wanted, WITHIN)


@contextlib.contextmanager
def trainer_of(net, optimizer, **how):
    name, numbers, _ = OPTIMIZERS[optimizer]
    with kv.create("dist") as store:
        yield Trainer(net.named_parameters(), name, dict(numbers), kvstore=store, **how), store


def by_mean(optimizer, **how):
    """``step()``: the loss of a pass is divided by the mean number of examples of a worker in the step."""
    net = network()
    with trainer_of(net, optimizer, **how) as (trainer, store):

        def step(number, parts, total):
            for part in parts:
                (summed_loss(net, part) * store.num_workers / total).backward()
            trainer.set_learning_rate(rate_at(number))
            trainer.step()

        return losses(net, step, store.rank, store.num_workers)


def by_size(optimizer, **how):
    """``step(batch_size)``: losses are sums, and the size is that of the whole step."""
    net = network()
    with trainer_of(net, optimizer, **how) as (trainer, store):

        def step(number, parts, total):
            for part in parts:
                summed_loss(net, part).backward()
            trainer.set_learning_rate(rate_at(number))
            trainer.step(total)

        return losses(net, step, store.rank, store.num_workers)


def as_torch(optimizer, **how):
    """``as_torch_optimizer()``, with a schedule of torch."""
    net = network()
    with trainer_of(net, optimizer, **how) as (trainer, store):
        ours = trainer.as_torch_optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: rate_at(step) / RATE)

        def step(number, parts, total):
            for part in parts:
                (summed_loss(net, part) * store.num_workers / total).backward()
            ours.step()
            schedule.step()

        return losses(net, step, store.rank, store.num_workers)


def by_hand(optimizer, clip=False):
    """An optimizer that the Trainer does not take, stepped on each worker with the mean gradient of all."""
    net = network()
    theirs = REFUSED[optimizer](net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: rate_at(step) / RATE)
    with kv.create("dist") as store:
        trainer = Trainer(net.named_parameters(), "sgd", kvstore=store, update_on_kvstore=False)

        def step(number, parts, total):
            for part in parts:
                (summed_loss(net, part) * store.num_workers / total).backward()
            trainer.allreduce_grads(average=True)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            theirs.step()
            schedule.step()

        return losses(net, step, store.rank, store.num_workers)


BY_HAND = {"by hand": by_hand, "by hand-clipped": functools.partial(by_hand, clip=True)}
MODES = {
    "servers": functools.partial(by_mean, update_on_kvstore=True),
    "servers-clipped": functools.partial(by_mean, update_on_kvstore=True, clip_norm=CLIP),
    "workers": functools.partial(by_mean, update_on_kvstore=False),
    "workers-clipped": functools.partial(by_mean, clip_norm=CLIP),
    "servers-by-size": functools.partial(by_size, update_on_kvstore=True),
    "servers-by-size-clipped": functools.partial(by_size, update_on_kvstore=True, clip_norm=CLIP),
    "workers-by-size-clipped": functools.partial(by_size, clip_norm=CLIP),
    "torch-servers": functools.partial(as_torch, update_on_kvstore=True),
    "torch-servers-clipped": functools.partial(as_torch, update_on_kvstore=True, clip_norm=CLIP),
    "torch-clipped": functools.partial(as_torch, clip_norm=CLIP),
}
WORDS = [
    *(f"{mode}/{optimizer}" for mode in MODES for optimizer in OPTIMIZERS),
    *(f"{mode}/{optimizer}" for mode in BY_HAND for optimizer in REFUSED),
]
QUICK = [f"{mode}/torch.adamw" for mode in MODES]
QUICK += ["servers/sgd", "workers/torch.sgd", "by hand/adafactor", "by hand-clipped/asgd"]
"""Each mode, and each optimizer where its own equation counts."""


def check(word):
    mode, optimizer = word.split("/")
    compare({**MODES, **BY_HAND}[mode](optimizer), optimizer, clip="clipped" in mode)


@pytest.mark.slow_cases(*(word for word in WORDS if word not in QUICK))
@two.each(*WORDS)
def test_two_workers_make_the_steps_of_one_process(word):
    check(word)


@two
def test_the_state_of_an_optimizer_on_each_worker_is_equal_on_all_and_nothing_compares_its_rate(store):
    for extra, is_equal in ((0.0, True), (0.01, False)):
        net = network()
        optimizer = torch.optim.Adafactor(net.parameters(), lr=0.01 + extra * store.rank)
        with kv.create("dist") as own:
            trainer = Trainer(net.named_parameters(), "sgd", kvstore=own, update_on_kvstore=False)
            for _ in range(2):
                optimizer.zero_grad()
                net(torch.randn(4, 6)).square().mean().backward()
                trainer.allreduce_grads(average=True)
                optimizer.step()
        states = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        numbers = torch.cat(
            [*(value.flatten() for value in states), *(one.detach().flatten() for one in net.parameters())]
        )
        assert torch.equal(store.average(numbers), numbers) == is_equal


@pytest.mark.slow
@four.each(*WORDS)
def test_four_workers_make_the_steps_of_one_process(word):
    check(word)


@pytest.mark.slow_cases("sgd-2-True", "sgd-2-False", "torch.sgd-2-True", "torch.sgd-4-True")
@pytest.mark.slow_cases("torch.adamw-2-False", "torch.adamw-4-True")
@pytest.mark.parametrize(("size", "clip"), [(2, True), (2, False), (4, True)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_of_horovod_make_the_steps_of_one_process(size, clip, optimizer):
    import kvdist.horovod as hvd

    def program(rank):
        net = network()
        theirs = OPTIMIZERS[optimizer][2](net.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: rate_at(step) / RATE)
        ours = hvd.DistributedOptimizer(theirs, net.named_parameters(), backward_passes_per_step=PASSES)

        def step(number, parts, total):
            for part in parts:
                (summed_loss(net, part) * size / total).backward()
            ours.synchronize()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            with ours.skip_synchronize():
                ours.step()
            schedule.step()

        return losses(net, step, rank, size)

    for found in returned(run_ranks(size, program)):
        compare(found, optimizer, clip)


@two
def test_rank_0s_weights_are_everybodys_from_the_first_pass_on_if_they_are_broadcast_before(store):
    """As DistributedDataParallel does when it is made; `step` does it after the first backward pass."""
    for is_early, wanted in ((True, 2.0 - 0.1 * 2.0), (False, 2.0 - 0.1 * (2.0 + 5.0) / 2)):
        weight = nn.Parameter(torch.tensor([2.0, 5.0])[store.rank : store.rank + 1].clone())
        with kv.create("dist") as own:
            trainer = Trainer([weight], "torch.sgd", {"lr": 0.1}, kvstore=own)
            if is_early:
                trainer.broadcast_parameters()
            (weight.square() / 2).sum().backward()
            trainer.step()
        same(weight, wanted, WITHIN)


# Half precision.


@two
def test_each_worker_rounds_the_sum_of_its_halves_before_it_travels(store):
    """2048 + 1 has no float16, and is rounded to 2048."""
    store.init("h", np.zeros(1, np.float16))
    parts = [[2048, 1], [1, 0]][store.rank]
    store.push("h", [np.array([part], np.float16) for part in parts])
    same(store.pull("h"), 2048)
    one = np.array([[2048], [3]][store.rank], np.float16)  # one array of each worker: rounded once, 2051 to 2052
    store.push("h", one)
    same(store.pull("h"), 2052)


def test_stores_of_one_process_sum_halves_in_float32():
    for name in ("local", "device"):
        with kv.create(name) as store:
            store.init("h", np.zeros(1, np.float16))
            store.push("h", [np.array([part], np.float16) for part in (2048, 1, 1, 0)])
            same(store.pull("h"), 2050)


# Uneven numbers of batches.


def uneven(rank):
    """Rank 0 has two batches, 1 five, 2 none, 3 three."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range((2, 5, 0, 3)[rank])]


kept = []
"""Modules of DistributedDataParallel until the process ends. Whoever frees one frees torch's group of processes too,
which locks the queue of gloo's thread while it holds the interpreter's lock; that thread, if it has just ended its last
sum, takes both in the other order (torch 2.13)."""


def by_ddp_with_join(store, make, schedule=lambda optimizer: None):
    """The weights by torch: DistributedDataParallel within its `join`, over gloo."""
    path = Path(os.environ["TMPDIR"], "ddp")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=store.rank, world_size=store.num_workers
    )
    net = DistributedDataParallel(network())
    kept.append(net)
    optimizer = make(net.parameters())
    scheduler = schedule(optimizer)
    with net.join():
        for batch in uneven(store.rank):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    # Torch's ranks that are done do not update their weights until the end, when the last one's are everybody's.
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    store.barrier()  # the group ends when all are out of it, and its file when all have left
    torch.distributed.destroy_process_group()
    store.barrier()
    path.unlink(missing_ok=True)
    return weights


def by_join(rank, optimizer, as_torch=False, **how):
    net = network()
    with trainer_of(net, optimizer, **how) as (trainer, store):
        ours = trainer.as_torch_optimizer() if as_torch else trainer
        with trainer.join():
            for batch in uneven(rank):
                net.zero_grad()
                net(batch).square().mean().backward()
                ours.step()
        weights = [parameter.detach().clone() for parameter in net.parameters()]
        for weight in weights:
            same(store.average(weight), weight)  # 2 and 4 are powers of two: the mean of equal weights is exact
        return weights


def check_join(store):
    expected = by_ddp_with_join(store, OPTIMIZERS["sgd"][2])
    for where, clip, as_torch in itertools.product((True, False), (None, math.inf), (False, True)):
        how = {"update_on_kvstore": where, "clip_norm": clip}
        for got, wanted in zip(by_join(store.rank, "sgd", as_torch, **how), expected, strict=True):
            same(got, wanted, WITHIN)


@two
def test_two_workers_join_as_under_torch(store):
    check_join(store)


@pytest.mark.slow
@four
def test_four_workers_join_as_under_torch(store):
    check_join(store)


def in_groups(cls, others, **numbers):
    """Makes an optimizer of torch with two groups: matrices, and biases with numbers of their own."""

    def make(parameters):
        by_ndim = {}
        for parameter in parameters:
            by_ndim.setdefault(parameter.ndim, []).append(parameter)
        return cls([{"params": by_ndim[2]}, {"params": by_ndim[1], **others}], lr=RATE, **numbers)

    return make


def cycle(optimizer):
    """Changes rates at each step, and in AdamW's groups the first of the betas."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.1], total_steps=10)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


class ByEpsilon(torch.optim.lr_scheduler.LambdaLR):
    """A schedule of a number that none of torch's own changes."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch=None):
        for number, group in enumerate(self.optimizer.param_groups):
            group["eps"] = group["eps"] * 30 * (1 + number)


GIVEN = {
    "sgd": (in_groups(torch.optim.SGD, {"momentum": 0.5, "weight_decay": 0.1}, momentum=0.9), cosine),
    "adamw": (in_groups(torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True}), cosine),
    "adamw-cycle": (in_groups(torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.9, 0.5)}), cycle),
    "adam-epsilon": (in_groups(torch.optim.Adam, {"betas": (0.9, 0.5)}), ByEpsilon),
}
"""Optimizers of torch, and schedules; the last two change what servers cannot follow."""


def check_join_of_torch(store, word):
    """The weights are those of torch's join, and all workers' groups have the numbers of who made the last step."""
    make, schedule = GIVEN[word]
    expected = by_ddp_with_join(store, make, schedule)
    for here in (False,) if schedule in (cycle, ByEpsilon) else (True, False):
        net = network()
        with kv.create("dist") as own:
            optimizer = make(net.parameters())
            trainer = Trainer(net.parameters(), optimizer, kvstore=own, update_on_kvstore=here)
            scheduler = schedule(optimizer)
            with trainer.join():
                for batch in uneven(store.rank):
                    optimizer.zero_grad()
                    net(batch).square().mean().backward()
                    trainer.step()
                    scheduler.step()
            for got, wanted in zip(net.parameters(), expected, strict=True):
                same(got, wanted, WITHIN)
            net.zero_grad()
            trainer.step()  # and training goes on


@two.each(*GIVEN)
def test_optimizers_of_torch_join_as_under_torch(word):
    with kv.create("dist") as store:
        check_join_of_torch(store, word)


@two
def test_who_is_done_follows_the_rates_of_the_others(store):
    """Momentum, and a rate and a factor that change while rank 0 is done; and its groups have them afterwards."""
    net = network()
    numbers = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = Trainer(net.parameters(), "sgd", numbers, kvstore=store, update_on_kvstore=False)
    optimizer = trainer.as_torch_optimizer()
    with trainer.join():
        for number, batch in enumerate(uneven(store.rank)):
            optimizer.param_groups[0].update(lr=0.1 / (number + 1), momentum=0.9 - 0.1 * number)
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.1 / 5, 0.9 - 0.1 * 4)
    for weight in net.parameters():
        same(store.average(weight.detach()), weight.detach())


@two
def test_an_error_in_the_block_is_an_error_of_all(store):
    net = network()
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    error, message = (ValueError, "an empty file") if store.rank else (RuntimeError, "worker-1 left `with trainer.join")
    with pytest.raises(error, match=message), trainer.join():
        for number in range(3):
            if store.rank == 1 and number == 1:
                raise ValueError("an empty file")
            net.zero_grad()
            net(torch.ones(1, 6)).sum().backward()
            trainer.step()
    store.barrier()  # training may go on
    net.zero_grad()
    net(torch.ones(1, 6)).sum().backward()
    trainer.step()


@two
def test_what_a_worker_that_is_done_cannot_do_is_refused(store):
    net = network()
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=False)
    with trainer.join():
        with pytest.raises(RuntimeError, match="trainer.join.. is within another"), trainer.join():
            pass
        with pytest.raises(RuntimeError, match="with clip_norm to clip"):
            trainer.allreduce_grads()
    with kv.create("dist") as other:
        overlapping = Trainer(network().parameters(), "sgd", kvstore=other, overlap=True)
        with pytest.raises(NotImplementedError, match="overlap=False"), overlapping.join():
            pass
    with kv.create("collective") as other:
        elsewhere = Trainer(network().parameters(), "sgd", kvstore=other)
        with pytest.raises(NotImplementedError, match="needs a store 'dist', not 'collective'"):
            elsewhere.join().__enter__()
    trainer.set_learning_rate(0.1 + store.rank)
    with pytest.raises(kvdist.InitMismatch, match="learning_rate 1.1"), trainer.join():
        pass
    with kv.create("dist") as other:
        net = network()
        there = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=other)
        there.broadcast_parameters()
        there.set_learning_rate(0.1 + store.rank)
        with pytest.raises(kvdist.OptimizerMismatch, match="worker-1 says lr 1.1"), there.join():
            net(torch.ones(1, 6)).sum().backward()
            there.step()


def test_alone_or_asynchronously_there_is_nothing_to_join():
    for kvstore in (None, "dist", "dist_async"):
        net = network()
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore)
        with trainer.join():
            net(torch.ones(1, 6)).sum().backward()
            trainer.step()
        trainer.close()


UNEVEN = """
    import sys
    import torch
    from kvdist import Trainer, kv
    with kv.create("dist") as store:
        net = torch.nn.Linear(1, 1)
        trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        with trainer.join():
            for number in range(2 + 20 * store.rank):
                net.zero_grad()
                net(torch.ones(1, 1)).sum().backward()
                trainer.step()
                if number == 3:
                    %s
"""


@pytest.mark.slow_cases("average", "store")
@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param("store.barrier()", "worker-1 waits for worker-0 in barrier", id="barrier"),
        pytest.param("store.average(1.0)", "worker-1 waits for worker-0 in barrier .average", id="average"),
        pytest.param("kv.create('dist').init('w', net.bias)", "worker-1 waits for worker-0 in init of", id="store"),
        pytest.param(
            "trainer.save_checkpoint('saved', 1).result()",
            "worker-1 waits for worker-0 in checkpoint of step 1",
            id="checkpoint",
        ),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)",
            "PeerLostError: worker-1 .* was lost, .*: killed by signal 9",
            id="death",
        ),
    ],
)
def test_who_waits_for_a_worker_that_is_done_is_named(job, script, tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    job.launch(2, 1, script(UNEVEN % call))
    assert any(job.finish().values())
    job.match("launcher", f".*{message}.*")


@pytest.mark.slow_cases("average", "barrier", "checkpoint here", "exception")
@pytest.mark.parametrize(
    "call, place",
    [
        pytest.param("store.barrier()", "barrier", id="barrier"),
        pytest.param("store.average(1.0)", "barrier .average.*", id="average"),
        pytest.param("trainer.save_checkpoint('saved', 1)", "checkpoint of step 1", id="checkpoint"),  # closing waits
        pytest.param("trainer.save_checkpoint('saved', 1).exception()", "checkpoint of step 1", id="exception"),
        pytest.param("trainer.save_checkpoint('saved', 1)", "barrier .exchange of bytes.*", id="checkpoint here"),
    ],
)
def test_without_join_the_error_names_both_places(job, script, tmp_path, monkeypatch, request, call, place):
    monkeypatch.chdir(tmp_path)
    where = "store, update_on_kvstore=False" if "here" in request.node.callspec.id else "store"
    text = UNEVEN.replace("with trainer.join():", "if True:").replace("%s", "pass").replace("=store)", f"={where})")
    job.launch(2, 1, script(f"{text}        {call}\n"))
    assert any(job.finish().values())
    job.match("launcher", f".*worker-0 waits for worker-1 in {place}; worker-1 waits for worker-0 to push 'weight' .*")


LEAVES = """
    import torch
    from kvdist import Trainer, kv
    with kv.create("dist") as store:
        weight = torch.nn.Parameter(torch.zeros(1))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=%s)
        for number in range(1 + 2 * store.rank):
            weight.grad = torch.full((1,), store.rank + 1.0)
            trainer.step()
        print("worker", store.rank, "has", weight.item())
"""


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("here", ["True", "False"])
def test_who_closes_its_last_store_has_left_and_means_are_over_those_that_remain(job, script, here):
    """Gradients of 1 and 2: first the mean of both, then worker 1's alone."""
    launcher = job.launch(2, 1, script(LEAVES % here))
    job.succeed()
    assert launcher.lines_with("worker 0 has -1.5") and launcher.lines_with("worker 1 has -5.5"), job.transcript()
