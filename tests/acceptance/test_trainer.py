"""The `Trainer`: every optimizer equals its equations, both conventions of a step, habits of Gluon and of torch."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import kvdist
from kvdist import Embedding, SplitSampler, Trainer, kv, lr_scheduler, optimizer
from tests.acceptance.together import Together, same
from tests.cases import each
from tests.optimizer import formulas

two = Together(
    2, 2, ["--server-module", "tests.acceptance.handlers"],
    MXNET_KVSTORE_BIGARRAY_BOUND="1000", KVDIST_CHECKPOINT_ROOT="/",
)  # fmt: skip
STEPS, RANKS = 5, 2
RATE, DECAY, CLIP = 0.05, 0.02, 0.8


def parameter(values):
    return torch.nn.Parameter(torch.as_tensor(values, dtype=torch.float32).clone())


def give(weight, gradient):
    """A backward pass that leaves this gradient."""
    (weight * torch.as_tensor(gradient, dtype=torch.float32)).sum().backward()


def moved(weights, trainer, gradients, size=None):
    """One step with a gradient for each weight."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None
        give(weight, torch.full(weight.shape, float(gradient)))
    trainer.step(size)


def gradient_of(rank, step, shape):
    return np.random.default_rng(100 * rank + step).normal(size=shape).astype(np.float32)


# Optimizers.


def trained(name, numbers, shape, **how):
    """The weights after each of some steps of a `Trainer`, from 1, 1.1, 1.2, …"""
    devices = how.pop("devices", 1)
    begun = 1 + 0.1 * np.arange(math.prod(shape)).reshape(shape)
    weights = [parameter(begun) for _ in range(devices)]
    trainer = Trainer([weights if devices > 1 else weights[0]], name, dict(numbers), **how)
    store, found = how["kvstore"], []
    for step in range(STEPS):
        for number, weight in enumerate(weights):
            weight.grad = None
            rank = number if devices > 1 else store.rank if isinstance(store, kvdist.KVStore) else 0
            give(weight, gradient_of(rank, step, shape))
        trainer.step()
        found.append(weights[-1].detach().numpy().copy())
    trainer.close()
    return found


def calculated(name, numbers, shape, formula, ranks):
    """The same by the equations, in float64."""
    weight, memory, found = 1 + 0.1 * np.arange(math.prod(shape)).reshape(shape), {}, []
    for step in range(STEPS):
        gradient = np.mean([gradient_of(rank, step, shape).astype(np.float64) for rank in range(ranks)], axis=0)
        own = {key: value for key, value in numbers.items() if key not in ("learning_rate", "wd", "clip_gradient")}
        weight = formula(
            weight, gradient, memory, step + 1, numbers.get("learning_rate"), numbers.get("wd", 0.0), own,
            numbers.get("clip_gradient"),
        )  # fmt: skip
        found.append(weight)
    return found


CASES = {word: case for word, case in zip(formulas.IDS, formulas.TABLE, strict=True) if case[0] != "sgld"}


def numbers_of(word):
    name, own, formula = CASES[word]
    numbers = {**own, "clip_gradient": CLIP}
    if name != "test":
        numbers |= {"learning_rate": RATE} | ({} if name in formulas.NO_DECAY else {"wd": DECAY})
    return name, numbers, formula


@two.each(*CASES)
def test_a_trainer_on_servers_makes_the_steps_of_the_equations(word):
    name, numbers, formula = numbers_of(word)
    wanted = calculated(name, numbers, (4, 3), formula, RANKS)
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            found = trained(name, numbers, (4, 3), kvstore=store, update_on_kvstore=on_kvstore)
        for got, want in zip(found, wanted, strict=True):
            same(got, want, 1e-6 * max(1, np.abs(want).max()))


@each("word", CASES)
def test_a_trainer_within_a_process_makes_the_steps_of_the_equations(word):
    name, numbers, formula = numbers_of(word)
    for devices, on_kvstore in ((1, None), (2, True), (2, False)):
        wanted = calculated(name, numbers, (4, 3), formula, devices)
        how = {"kvstore": "device", "devices": devices, "update_on_kvstore": on_kvstore}
        for got, want in zip(trained(name, numbers, (4, 3), **how), wanted, strict=True):
            same(got, want, 1e-6 * max(1, np.abs(want).max()))


def test_the_names_and_defaults_of_the_document_are_those_of_the_optimizers():
    names = {name for name, _, _ in formulas.TABLE}
    with pytest.raises(ValueError) as caught:
        optimizer.create("nothing")
    assert all(name in str(caught.value) for name in names)
    assert (optimizer.create("ADAM").learning_rate, optimizer.create("nag").momentum) == (0.001, 0.9)
    for wrong in ({"momentum": 1.0}, {"learning_rate": -1.0}):
        with pytest.raises(ValueError):
            optimizer.create("sgd", **wrong)
    with pytest.raises(TypeError):
        optimizer.create("sgd", mometum=0.9)


@two
def test_lars_lamb_and_lans_measure_whole_parameters_however_many_servers_there_are():
    shape = (61, 59)  # more elements than the bound at which keys are cut
    for word in ("lars-eta=0.1", "lamb", "lans", "groupadagrad", "adam"):
        name, numbers, formula = numbers_of(word)
        wanted = calculated(name, numbers, shape, formula, RANKS)
        with kv.create("dist") as store:
            found = trained(name, numbers, shape, kvstore=store)
        same(found[-1], wanted[-1], 2e-6 * np.abs(wanted[-1]).max())


@two
def test_lars_leaves_parameters_of_one_dimension_at_the_plain_rate(store):
    weight = parameter([3.0, 4.0])
    trainer = Trainer([weight], "lars", {"learning_rate": 0.5, "eta": 0.001}, kvstore=store)
    moved([weight], trainer, [2])
    same(weight, [2, 3])


@two
def test_the_noise_of_sgld_has_the_variance_of_its_rate_and_is_that_of_any_number_of_servers():
    ends = []
    for name in ("dist", "local"):
        with kv.create(name) as store:
            weight = parameter(np.zeros((100, 100)))
            trainer = Trainer([weight], "sgld", {"learning_rate": 0.04, "seed": 5}, kvstore=store)
            for _ in range(2):
                moved([weight], trainer, [1])
            ends.append(weight.detach().numpy())
    assert np.array_equal(*ends)
    assert abs(ends[0].mean() + 2 * 0.02) < 0.01 and abs(ends[0].std() - math.sqrt(2 * 0.04)) < 0.01


@two
def test_an_optimizer_of_ones_own_trains_on_the_servers(store):
    from tests.acceptance import handlers  # noqa: F401 (which registers it here, too)

    weight = parameter([1.0, 1.0])
    trainer = Trainer([weight], "signdescent", {"learning_rate": 0.25}, kvstore=store)
    moved([weight], trainer, [-7])
    same(weight, [1.25, 1.25])


@two
def test_small_steps_of_halves_are_lost_unless_there_is_a_master():
    for dtype, on_kvstore in itertools.product((torch.float16, torch.bfloat16), (True, False)):
        for keeps in (False, True):
            with kv.create("dist") as store:
                weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
                numbers = {"learning_rate": 2**-11, "multi_precision": keeps}
                trainer = Trainer([weight], "sgd", numbers, kvstore=store, update_on_kvstore=on_kvstore)
                for _ in range(64):
                    weight.grad = torch.full((3,), 2**-2 if dtype is torch.float16 else 1.0, dtype=dtype)
                    trainer.step()
                lost = 64 * 2**-13 if dtype is torch.float16 else 64 * 2**-11
                same(weight, [1.0 - lost if keeps else 1.0] * 3)


# Schedules.

SCHEDULES = {
    "factor": (lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=1.0), [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]),
    "multifactor": (
        lr_scheduler.MultiFactorScheduler(step=[2, 5], factor=0.5, base_lr=1.0), [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25],
    ),
    "poly": (
        lr_scheduler.PolyScheduler(max_update=4, base_lr=1.0, pwr=2, final_lr=0.0),
        [(1 - share) ** 2 for share in (0.25, 0.5, 0.75, 1, 1, 1, 1)],
    ),
    "cosine": (
        lr_scheduler.CosineScheduler(max_update=4, base_lr=1.0, final_lr=0.5),
        [0.5 + 0.25 * (1 + math.cos(math.pi * share)) for share in (0.25, 0.5, 0.75, 1, 1, 1, 1)],
    ),
    "warmup": (
        lr_scheduler.FactorScheduler(step=100, base_lr=1.0, warmup_steps=4, warmup_begin_lr=0.5),
        [0.625, 0.75, 0.875, 1, 1, 1, 1],
    ),
    "constant": (
        lr_scheduler.FactorScheduler(100, base_lr=1.0, warmup_steps=3, warmup_mode="constant", warmup_begin_lr=0.25),
        [0.25, 0.25, 1, 1, 1, 1, 1],
    ),
}  # fmt: skip


@two.each(*SCHEDULES)
def test_a_schedule_is_followed_on_servers_and_on_workers(word):
    schedule, rates = SCHEDULES[word]
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weights = [parameter([0.0]), parameter([0.0])]
            groups = [{"params": weights[0]}, {"params": weights[1], "lr_mult": 4.0}]
            trainer = Trainer(
                groups, "sgd", {"lr_scheduler": schedule}, kvstore=store, update_on_kvstore=on_kvstore
            )  # fmt: skip
            total = 0.0
            for rate in rates:
                moved(weights, trainer, [1, 1])
                total -= rate
                same(weights[0], [total], 1e-6), same(weights[1], [4 * total], 4e-6)
                assert abs(trainer.learning_rate - rate) < 1e-12
            with pytest.raises(Exception, match="schedule"):
                trainer.set_learning_rate(0.5)


@two
def test_a_learning_rate_beside_a_schedule_is_its_base(store):
    weight = parameter([0.0])
    numbers = {"learning_rate": 8.0, "lr_scheduler": lr_scheduler.FactorScheduler(step=1, factor=0.5)}
    trainer = Trainer([weight], "sgd", numbers, kvstore=store)
    for total in (-8, -12, -14):
        moved([weight], trainer, [1])
        same(weight, [total])


# Steps.


@two
def test_step_averages_over_workers_and_step_with_a_size_sums_what_each_divides():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weight = parameter([0.0, 0.0])
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_kvstore)
            moved([weight], trainer, [2 + 4 * store.rank])
            same(weight, [-4, -4])
            moved([weight], trainer, [8], size=4)
            same(weight, [-8, -8])
            moved([weight], trainer, [8], size=(4, 8)[store.rank])  # another one in the next step, and on each worker
            same(weight, [-11, -11])


@two.each("servers", "workers", "servers that clip", "workers that clip", "collective")
def test_batches_of_unequal_sizes_make_the_steps_of_one_big_batch(word):
    inputs = torch.from_numpy(np.random.default_rng(3).normal(size=(40, 6)).astype(np.float32))
    network, alone = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    alone.load_state_dict(network.state_dict())
    clip = 0.5 if "clip" in word else None
    with kv.create("collective" if word == "collective" else "dist") as store:
        how = {"update_on_kvstore": "servers" in word, "clip_norm": clip}
        trainer = Trainer(network.parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store, **how)
        trainer.broadcast_parameters()
        alone.load_state_dict(network.state_dict())
        torchs = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
        for begin, middle, end in ((0, 9, 12), (12, 13, 30), (30, 35, 40)):
            part = inputs[begin:middle] if store.rank == 0 else inputs[middle:end]
            for net, batch in ((network, part), (alone, inputs[begin:end])):
                net.zero_grad()
                net(batch).tanh().sum(1).mean().backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
            trainer.step(samples=len(part))
            torchs.step()
            assert trainer.samples_seen == end
            for mine, its in zip(network.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
                if "servers" not in word:
                    torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=1e-6)


@two.each("servers", "servers, overlap", "servers, async", "workers", "workers, overlap")
def test_samples_seen_is_what_batches_have_handed_out_or_steps_say_and_goes_back_with_a_checkpoint(word):
    folder = Path(tempfile.gettempdir(), f"kvdist-samples-{os.getppid()}-{word}")
    with kv.create("dist_async" if "async" in word else "dist") as store:
        how = {"update_on_kvstore": "servers" in word, "overlap": "overlap" in word}
        network = torch.nn.Linear(60, 40)  # cut over both servers, and a small one
        trainer = Trainer(network.parameters(), "sgd", {"learning_rate": 0.01}, kvstore=store, **how)

        def seen():
            store.barrier()
            found = trainer.samples_seen
            store.barrier()
            return found

        def backward(inputs):
            network.zero_grad()
            network(inputs).square().mean().backward()

        counts = [seen()]
        loader = torch.utils.data.DataLoader(torch.randn(22, 60), 4, sampler=SplitSampler(22, 2, store.rank))
        for inputs in trainer.batches(loader):
            backward(inputs)
            trainer.step()
            counts.append(seen())
        assert counts == [0, 8, 16, 22]
        trainer.save_checkpoint(folder, 3).result()
        backward(torch.randn(4, 60))
        trainer.step(None if how["overlap"] else 3 + store.rank)
        assert seen() == (22 if how["overlap"] else 29), "a step with overlap has nowhere to say it"
        trainer.load_checkpoint(folder)
        assert seen() == 22
        store.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@two.each("dist", "hybrid")
def test_rows_weigh_as_much_as_the_samples_of_their_workers(word):
    with kv.create(word) as store:
        store.set_optimizer("sgd", learning_rate=1.0)
        table = Embedding(4, 2, store, "table", "zeros")
        table(torch.tensor([1 + store.rank, 3])).sum().backward()
        table.step(samples=(1, 3)[store.rank])
        store.barrier()
        same(table(torch.tensor([0, 1, 2, 3])), [[0, 0], [-0.25, -0.25], [-0.75, -0.75], [-1, -1]])


@two
def test_a_worker_that_skips_beside_a_sum_where_workers_update_changes_nothing(store):
    weight = parameter([0.0])
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=False)
    give(weight, [8.0])
    trainer.step(2) if store.rank else trainer.skip_step()
    same(weight, [-4])


@two
def test_a_worker_that_skips_weighs_nothing_and_all_or_none_give_their_samples():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weight = parameter([0.0])
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_kvstore)
            weight.grad = None
            give(weight, [4.0])
            trainer.step(samples=3) if store.rank else trainer.skip_step()
            same(weight, [-4])
            give(weight, [4.0])
            with pytest.raises((kvdist.OptimizerMismatch, ValueError), match=r"(?s)samples.*on all workers"):
                trainer.step(samples=3) if store.rank else trainer.step()
            assert trainer.samples_seen == 3
            wrong = ({"samples": number} for number in (0, 1 << 32, 2.5, True))
            for arguments in (*wrong, {"batch_size": 2, "samples": 2}):
                with pytest.raises(ValueError, match="samples"):
                    trainer.step(**arguments)
            same(weight, [-4])


@two
def test_the_first_step_makes_rank_0s_weights_everybodys_the_frozen_ones_too(store):
    weights = [parameter([store.rank + 1.0]), parameter([store.rank + 5.0])]
    weights[1].requires_grad_(False)
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store)
    give(weights[0], [1.0])
    trainer.step()
    same(weights[0], [0]), same(weights[1], [5])


@two
def test_a_learning_rate_set_in_mid_run_counts_from_the_next_step():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weight = parameter([0.0])
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_kvstore)
            for rate, total in ((1.0, -2), (0.5, -3), (4.0, -11)):
                trainer.set_learning_rate(rate)
                assert trainer.learning_rate == rate
                moved([weight], trainer, [2])
                same(weight, [total])


@two.each("servers", "workers", "workers with overlap", "allreduce_grads", "collective")
def test_workers_that_set_different_rates_are_named_and_their_weights_stay(word):
    with kv.create("collective" if word == "collective" else "dist") as store:
        weight = parameter([0.0])
        how = {"update_on_kvstore": word == "servers", "overlap": word == "workers with overlap"}
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, **how)
        for rate in (1.0, 2.0):  # the same on all
            trainer.set_learning_rate(rate)
            moved([weight], trainer, [1])
        same(weight, [-3])
        trainer.set_learning_rate(1.0 + store.rank)
        give(weight, [1.0])
        with pytest.raises(kvdist.OptimizerMismatch, match=r"worker-0 says.* 1\b.*worker-1 says.* 2\b"):
            trainer.allreduce_grads() if word == "allreduce_grads" else trainer.step()
        same(weight, [-3])


@two.each("wd", "lr_mult", "betas")
def test_other_numbers_that_differ_where_workers_update_are_an_error_too(word, store):
    weight = parameter([0.0])
    trainer = Trainer([weight], torch.optim.Adam([weight], lr=0.5), kvstore=store, update_on_kvstore=False)
    moved([weight], trainer, [1])
    before = weight.tolist()
    group = trainer.as_torch_optimizer().param_groups[0]
    if word == "wd":
        group["weight_decay"] = 0.1 * store.rank
    elif word == "betas":
        group["betas"] = (0.8 + 0.1 * store.rank, 0.999)
    else:
        trainer.optimizer.lr_mult = {0: 1.0 + store.rank}
    with pytest.raises(kvdist.OptimizerMismatch, match="worker-0 says: learning rate .*worker-1 says: learning rate"):
        moved([weight], trainer, [1])
    same(weight, before)


@two
def test_passes_that_accumulate_make_one_step_with_and_without_overlap():
    for overlap, on_kvstore in itertools.product((False, True), (True, False)):
        with kv.create("dist") as store:
            weight = parameter([0.0, 0.0])
            how = {"kvstore": store, "overlap": overlap, "update_on_kvstore": on_kvstore}
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, **how)
            for total in (-6, -12):
                weight.grad = None
                with trainer.no_sync():
                    give(weight, [1.0 + store.rank] * 2)
                    give(weight, [0.5] * 2)
                give(weight, [4.0] * 2)
                trainer.step()
                same(weight, [total, total])


@two
def test_overlap_gives_the_same_bits_and_refuses_what_comes_too_late():
    ends = []
    for overlap, on_kvstore in itertools.product((False, True), (True, False)):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
        with kv.create("dist") as store:
            how = {"kvstore": store, "overlap": overlap, "update_on_kvstore": on_kvstore}
            trainer = Trainer(net.parameters(), "adam", {"learning_rate": 0.05}, **how)
            generator = torch.Generator().manual_seed(store.rank)
            for _ in range(4):
                net.zero_grad()
                net(torch.randn(8, 40, generator=generator)).square().mean().backward()
                trainer.step()
            ends.append([weight.detach().clone() for weight in net.parameters()])
            if not overlap:
                continue
            net(torch.ones(1, 40)).sum().backward()
            with pytest.raises(RuntimeError):
                net(torch.ones(1, 40)).sum().backward()
            with pytest.raises((RuntimeError, ValueError)):
                trainer.step()
            trainer.close()
    for other in ends[1:]:
        assert all(torch.equal(*pair) for pair in zip(ends[0], other, strict=True))
    with kv.create("dist") as store:
        weight = parameter([1.0])
        trainer = Trainer([weight], "sgd", kvstore=store, overlap=True)
        give(weight, [1.0])
        trainer.step()
        weight.grad = None
        with pytest.raises(ValueError):
            trainer.step(4)


@two
def test_sums_can_be_changed_between_allreduce_grads_and_update():
    for size, wanted in ((None, -3.0), (2, -1.5)):
        with kv.create("dist") as store:
            weight = parameter([0.0])
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=False)
            give(weight, [4.0 + 6 * store.rank])
            trainer.allreduce_grads()
            same(weight.grad, [14])
            weight.grad.clamp_(max=3)
            trainer.update(size)
            same(weight, [wanted])
            weight.grad = None
            give(weight, [4.0 + 6 * store.rank])
            trainer.allreduce_grads(average=True)
            same(weight.grad, [7])
            trainer.update()
            same(weight, [wanted - 7])


@two
def test_an_old_gradient_is_an_error_before_anything_is_sent_or_is_left_out():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weights = [parameter([0.0]), parameter([0.0])]
            trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_kvstore)
            moved(weights, trainer, [1, 1])
            weights[0].grad = None
            give(weights[0], [1.0])
            with pytest.raises(RuntimeError, match="ignore_stale_grad"):
                trainer.step()
            same(weights[0], [-1])
            trainer.step(ignore_stale_grad=True)
            same(weights[0], [-2]), same(weights[1], [-1])


@two
def test_a_parameter_without_a_gradient_on_one_worker_gets_the_others_update():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weights = [parameter([0.0]), parameter([0.0]), parameter([7.0])]
            trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_kvstore)
            give(weights[0], [2.0])
            if store.rank:
                give(weights[1], [2.0])
            trainer.step()
            same(weights[0], [-2]), same(weights[1], [-1]), same(weights[2], [7])


@two
def test_groups_have_multipliers_and_parameters_of_several_layers_are_one_key(store):
    weights = [parameter([2.0]), parameter([2.0]), parameter([2.0])]
    groups = [
        {"params": [weights[0], weights[0]]},
        {"params": [weights[1]], "lr_mult": 10.0},
        {"params": [weights[2]], "wd_mult": 0.0},
    ]
    trainer = Trainer(groups, "sgd", {"learning_rate": 0.5, "wd": 0.5}, kvstore=store)
    moved(weights, trainer, [1, 1, 1])
    same(weights[0], [2 - 0.5 * 2]), same(weights[1], [2 - 5 * 2]), same(weights[2], [2 - 0.5 * 1])
    trainer.optimizer.lr_mult[0] = 0.0
    moved(weights, trainer, [1, 1, 1])
    same(weights[0], [1]), same(weights[2], [1])


@two
def test_a_dict_is_taken_in_the_order_of_its_names(store):
    weights = {"b": parameter([2.0]), "a": parameter([1.0])}
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store)
    trainer.broadcast_parameters()
    same(store.pull(0), [1]), same(store.pull(1), [2])


@two
def test_models_that_differ_are_told_to_all_workers_before_the_first_gradient():
    with kv.create("dist") as store:
        weight = parameter(np.zeros(2 + store.rank))
        trainer = Trainer([weight], "sgd", kvstore=store)
        give(weight, np.zeros(2 + store.rank))
        with pytest.raises(kvdist.InitMismatch, match="worker-[01]"):
            trainer.step()


@two
def test_weights_changed_by_hand_are_an_error_until_they_are_broadcast(store):
    weight = parameter([0.0])
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore=store)
    moved([weight], trainer, [1])
    with torch.no_grad():
        weight.fill_(10 + store.rank)
    with pytest.raises(RuntimeError, match="broadcast_parameters"):
        moved([weight], trainer, [1])
    trainer.broadcast_parameters()
    same(weight, [10])
    moved([weight], trainer, [1])
    same(weight, [10 - 1 - 0.5])  # the state of the optimizer has stayed


@two
def test_lazy_modules_need_one_forward_pass(store):
    net = torch.nn.LazyLinear(1)
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=store)
    with pytest.raises(Exception, match="forward"):
        trainer.step()
    net(torch.ones(2, 3)).sum().backward()
    trainer.step()
    assert net.weight.shape == (1, 3)


@two
def test_gradients_that_are_not_finite_are_refused_and_a_skipped_step_stops_nobody(store):
    weight = parameter([0.0])
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, reject_nonfinite=True)
    moved([weight], trainer, [2])
    weight.grad = None
    give(weight, [math.nan if store.rank else 4.0])
    if store.rank:
        with pytest.raises(FloatingPointError, match="1"):
            trainer.step()
        trainer.skip_step()
    else:
        trainer.step()
    same(weight, [-2 - 4 / 2])
    assert trainer.nonfinite_steps == store.rank
    trainer.skip_step()  # on all
    same(weight, [-4])


@two
def test_clip_norm_clips_the_mean_or_the_sum_and_tells_the_norm(store):
    weights = [parameter([0.0]), parameter([0.0])]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store, clip_norm=1.0)
    assert trainer.grad_norm is None
    moved(weights, trainer, [6 * store.rank, 8 * store.rank])
    assert float(trainer.grad_norm) == 5
    same(weights[0], [-0.6], 1e-6), same(weights[1], [-0.8], 1e-6)
    moved(weights, trainer, [6 * store.rank, 8 * store.rank], size=1)
    assert float(trainer.grad_norm) == 10
    for other in ({"overlap": True}, {"share_weights": True}, {"kvstore": "dist_async"}):
        with pytest.raises(ValueError):
            Trainer([parameter([0.0])], "sgd", **{"kvstore": "dist", "clip_norm": 1.0, **other}).broadcast_parameters()


@two
def test_states_are_saved_and_loaded_whoever_updates():
    for on_kvstore in (True, False):
        folder, ends = Path(tempfile.gettempdir()) / f"states-{on_kvstore}", []
        for load in (False, True):
            with kv.create("dist") as store:
                weight = parameter([0.0])
                numbers = {"learning_rate": 1.0, "momentum": 0.5}
                trainer = Trainer([weight], "sgd", numbers, kvstore=store, update_on_kvstore=on_kvstore)
                if load:
                    trainer.broadcast_parameters()
                    trainer.load_states(folder)
                else:
                    moved([weight], trainer, [4])
                    trainer.save_states(folder)
                before = weight.item()
                moved([weight], trainer, [0])
                ends.append(weight.item() - before)
        assert ends == [-2.0, -2.0]
    with kv.create("dist") as store:
        store.barrier()
        if store.rank == 0:
            for folder in Path(tempfile.gettempdir()).glob("states-*"):
                shutil.rmtree(folder)


@two
def test_gradients_are_compressed_whoever_updates():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weight = parameter([0.0, 0.0])
            how = {"kvstore": store, "update_on_kvstore": on_kvstore}
            params = {"type": "2bit", "threshold": 0.5}
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, compression_params=params, **how)
            for wanted in ([-0.5, 0], [-1.0, -0.5], [-1.5, -0.5], [-2.0, -1.0]):
                weight.grad = None
                give(weight, [3.0, 0.25])
                trainer.step()
                same(weight, wanted)


@two
def test_shared_weights_show_what_ordinary_ones_have_and_refuse_writes():
    ends = []
    for shares in (False, True):
        with kv.create("dist") as store:
            weight = parameter(np.zeros((300, 400)))
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, share_weights=shares)
            for step in range(3):
                moved([weight], trainer, [step + store.rank])
            ends.append(weight.detach().clone())
            if shares:
                with torch.no_grad():
                    weight += 1
                with pytest.raises(RuntimeError):
                    moved([weight], trainer, [0])
                trainer.broadcast_parameters()
                moved([weight], trainer, [0])
    assert torch.equal(*ends) and ends[0].unique().tolist() == [-4.5]


@two
def test_buffers_become_the_mean_over_workers_and_counts_those_of_rank_0(store):
    net = torch.nn.BatchNorm1d(2)
    net.running_mean.fill_(store.rank * 4.0)
    net.num_batches_tracked.fill_(7 + store.rank)
    kvdist.sync_buffers(net, store)
    same(net.running_mean, [2, 2])
    assert int(net.num_batches_tracked) == 7


@two
@each("samples, mean", [((30, 10), 1), ((0, 10), 4), ((10, 10), 2), ((0, 0), 2)])
def test_buffers_weigh_by_the_examples_that_they_are_of(store, samples, mean):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2).half(), torch.nn.BatchNorm1d(2).double())
    for one in net:
        one.running_mean.fill_(store.rank * 4.0)
        one.running_var.fill_(store.rank * 4.0 if samples[store.rank] or not any(samples) else math.nan)
        one.num_batches_tracked.fill_(7 + store.rank)
    kvdist.sync_buffers(net, store, samples=samples[store.rank])
    for one in net:
        same(one.running_mean.float(), [mean, mean])
        same(one.running_var.float(), [mean, mean])
        assert int(one.num_batches_tracked) == 7


@two
def test_buffers_of_which_only_one_worker_says_the_examples_are_refused_on_all(store):
    net = torch.nn.BatchNorm1d(2)
    with pytest.raises(kvdist.InitMismatch, match="average of"):
        kvdist.sync_buffers(net, store, samples=5 if store.rank else None)
    same(net.running_mean, [0, 0])


@two
def test_an_asynchronous_trainer_makes_the_steps_of_all_workers():
    with kv.create("dist_async") as store:
        weight = parameter([0.0])
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        for _ in range(3):
            moved([weight], trainer, [1 + store.rank])
        store.barrier()
        moved([weight], trainer, [0])
        same(weight, [-9])
        with pytest.raises(RuntimeError):
            trainer.allreduce_grads()
    with pytest.raises(ValueError):
        Trainer([parameter([0.0])], "sgd", kvstore="dist_async", update_on_kvstore=False).broadcast_parameters()


@two
def test_horovods_operations_and_a_collective_trainer_work_beside_servers():
    import kvdist.horovod as hvd

    hvd.init()
    assert (hvd.size(), hvd.rank()) == (2, int(os.environ["KVDIST_RANK"]))
    same(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum), [3])
    for name in ("collective", "hybrid"):
        weight = parameter([0.0])
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=name)
        moved([weight], trainer, [2 + 4 * hvd.rank()])
        same(weight, [-4])
        trainer.close()
    hvd.shutdown()


# As an optimizer of torch.


@two
def test_as_torch_optimizer_follows_schedulers_and_groups_on_servers_and_workers():
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weight = parameter([0.0])
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_kvstore)
            own = trainer.as_torch_optimizer()
            assert isinstance(own, torch.optim.Optimizer) and trainer.as_torch_optimizer() is own
            schedule = torch.optim.lr_scheduler.StepLR(own, step_size=2, gamma=0.5)
            total = 0.0
            for rate in (1, 1, 0.5, 0.5, 0.25):
                own.zero_grad()
                give(weight, [2.0 * store.rank])
                own.step()
                schedule.step()
                total -= rate
                same(weight, [total])
            own.param_groups[0]["lr"], own.param_groups[0]["weight_decay"] = 1.0, 0.5
            own.zero_grad()
            give(weight, [0.0])
            own.step()
            same(weight, [total / 2])
            own.step()  # the same gradient again, as torch does
            same(weight, [total / 4])


@two
def test_a_step_that_the_scaler_skips_on_one_worker_stops_nobody(store):
    weight = parameter([0.0])
    own = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store).as_torch_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for value, wanted in ((2.0, -2), (math.inf if store.rank else 4.0, -4), (2.0, -6)):
        own.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(own)
        scaler.update()
        same(weight, [wanted])


@two.each("servers", "workers")
def test_who_skips_a_step_makes_it_by_the_schedule_of_the_others(word, store):
    weight = parameter([0.0])
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=word == "servers")
    schedule = torch.optim.lr_scheduler.StepLR(trainer.as_torch_optimizer(), 1, 0.5)
    for number, total in enumerate((-1, -1.5, -1.625, -1.75)):
        weight.grad = None
        give(weight, [1.0])
        trainer.skip_step() if number == 2 and store.rank else trainer.step()
        schedule.step()
        same(weight, [total])


NAMES = {
    "sgd": {"momentum_buffer"}, "nag": {"momentum_buffer"}, "adam": {"exp_avg", "exp_avg_sq"},
    "adamw": {"exp_avg", "exp_avg_sq"}, "nadam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "adamax": {"exp_avg", "exp_inf"}, "adagrad": {"sum"}, "rmsprop": {"square_avg"},
    "adadelta": {"square_avg", "acc_delta"},
}  # fmt: skip


@two.each(*NAMES)
def test_the_state_has_torchs_names_whoever_updates(word):
    numbers = {"momentum": 0.5} if word == "sgd" else {}
    for on_kvstore in (True, False):
        with kv.create("dist") as store:
            weight = parameter([1.0, 2.0])
            trainer = Trainer([weight], word, numbers, kvstore=store, update_on_kvstore=on_kvstore)
            own = trainer.as_torch_optimizer()
            for _ in range(3):
                moved([weight], trainer, [1])
            state = own.state_dict()
            assert set(state) == {"state", "param_groups"} and set(state["state"][0]) == NAMES[word] | {"step"}
            assert int(state["state"][0]["step"]) == 3
            own.load_state_dict(state)
            store.barrier()


# Tables.


@two
def test_an_embedding_trains_as_torchs_and_pulls_the_rows_of_its_ids(store):
    store.set_optimizer("sgd", learning_rate=1.0)
    table = Embedding(1000, 2, store, initializer="constant(0.5)", padding_idx=9)
    mirror = torch.nn.Embedding(1000, 2, padding_idx=9)
    torch.nn.init.constant_(mirror.weight, 0.5)
    with torch.no_grad():
        mirror.weight[9] = 0
    torch_sgd = torch.optim.SGD(mirror.parameters(), 1.0)
    for step in range(3):
        batches = [torch.tensor([[1, 2 + step, 9], [rank + 5, 1, 999]]) for rank in range(2)]
        found = table(batches[store.rank])
        assert found.shape == (2, 3, 2)
        same(found, mirror(batches[store.rank]).detach())
        found.square().sum().backward()
        table.prefetch(torch.tensor([1, 5, 6]))
        table.step()
        torch_sgd.zero_grad()
        for ids in batches:
            (mirror(ids).square().sum() / 2).backward()
        torch_sgd.step()
        same(table(torch.tensor([1, 5, 6])), mirror(torch.tensor([1, 5, 6])).detach())
        table.step()  # a pass that no backward pass followed counts as nothing
    with pytest.raises((ValueError, TypeError)):
        table(torch.tensor([1000]))
    table(torch.tensor([[3]])).sum().backward()
    table.step(batch_size=4)  # sums
    with torch.no_grad():
        before = mirror.weight[3].clone()
        same(table(torch.tensor([3]))[0], before - 2 / 4)


@two
def test_a_sparse_gradient_trains_as_an_array(store):
    net = torch.nn.Embedding(5, 1, sparse=True)
    torch.nn.init.zeros_(net.weight)
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=store)
    net(torch.tensor([store.rank, 3, 3])).sum().backward()
    trainer.step()
    same(net.weight[:, 0], [-0.5, -0.5, 0, -2, 0])
    with pytest.raises(ValueError, match="sparse"):
        stepped("dist", 1, False, sparse=True)


# Who updates the weights.


def updates(trainer):
    """Whether a store updates, as a program can tell: sums are not handed out then."""
    try:
        trainer.allreduce_grads()
    except RuntimeError:
        return True
    return False


def stepped(kvstore, devices, wanted, sparse=False):
    layers = [torch.nn.Embedding(2, 1, sparse=sparse) for _ in range(devices)]
    weights = [[layer.weight for layer in layers] if devices > 1 else layers[0].weight]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=kvstore, update_on_kvstore=wanted)
    for layer in layers:
        layer(torch.tensor([0])).sum().backward()
    trainer.step()
    for layer in layers:
        layer.weight.grad = None
        layer(torch.tensor([0])).sum().backward()
    return trainer


@each(
    "kvstore, devices, wanted, has_store, store_updates",
    [
        (None, 1, None, False, False),
        ("local", 1, None, False, False),
        ("device", 1, True, False, False),
        ("local", 2, None, True, True),
        ("device", 2, None, True, True),
        ("local_allreduce_cpu", 2, None, True, True),
        ("device", 2, False, True, False),
        ("device", 2, True, True, True),
    ],
)
def test_who_updates_the_weights_within_a_process(kvstore, devices, wanted, has_store, store_updates):
    trainer = stepped(kvstore, devices, wanted)
    assert (trainer.kvstore is not None, updates(trainer)) == (has_store, store_updates)


@each("wanted, store_updates", [(None, False), (False, False), (True, True)])
def test_where_a_gradient_is_sparse_the_devices_update_unless_the_store_is_wanted(wanted, store_updates):
    assert updates(stepped("device", 2, wanted, sparse=True)) is store_updates


def test_a_store_that_was_made_before_updates_and_several_devices_need_one(monkeypatch):
    with kv.create("local") as store:
        assert updates(stepped(store, 1, None))
    with pytest.raises(ValueError):
        stepped(None, 2, None)
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    assert not updates(stepped("device", 2, None))
    assert updates(stepped("device", 2, True))


@two
def test_who_updates_the_weights_on_servers():
    for wanted, expected in ((None, True), (True, True), (False, False)):
        with kv.create("dist") as store:
            trainer = stepped(store, 1, wanted)
            assert trainer.kvstore is store and updates(trainer) is expected
            trainer.skip_step() if expected else trainer.update()
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
    try:
        with kv.create("dist") as store:
            assert not updates(stepped(store, 1, None))
    finally:
        del os.environ["MXNET_UPDATE_ON_KVSTORE"]


class Plain(kv.KVStoreBase):
    """Sums over the devices of one process, as in docs/reference/mxnet.md."""

    type, rank, num_workers = "plain", 0, 1

    def broadcast(self, key, value, out, priority=0):
        for one in out:
            one.detach().copy_(value)

    def pushpull(self, key, value, out=None, priority=0):
        total = sum(one.detach() for one in value)
        for one in value if out is None else out:
            one.detach().copy_(total)

    def is_capable(self, capability):
        return False

    def set_optimizer(self, optimizer):
        raise NotImplementedError


def test_a_store_of_ones_own_sums_and_the_workers_update():
    kv.register(Plain)
    for wanted in (None, False):
        trainer = stepped("plain", 1, wanted)
        assert isinstance(trainer.kvstore, Plain) and not updates(trainer)
    with pytest.raises(ValueError):
        stepped("plain", 1, True)
    weight = parameter([0.0])
    moved([weight], Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="plain"), [3])
    same(weight, [-3])


def test_replicas_on_several_devices_train_as_one_network_on_the_whole_batch():
    torch.manual_seed(0)
    net, x = torch.nn.Linear(4, 1), torch.randn(6, 4)
    mirror = torch.nn.Linear(4, 1)
    mirror.load_state_dict(net.state_dict())
    nets = kvdist.replicate(net, ["cpu", "cpu"])
    trainer = Trainer(nets.parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.5})
    torch_sgd = torch.optim.SGD(mirror.parameters(), 0.1, momentum=0.5)
    for _ in range(4):
        nets.zero_grad(), torch_sgd.zero_grad()
        for one, part in zip(nets, kvdist.split_and_load(x, ["cpu", "cpu"]), strict=True):
            one(part).square().sum().backward()
        trainer.step(len(x))
        mirror(x).square().mean().backward()
        torch_sgd.step()
    for one in nets:
        same(one.weight, mirror.weight.detach(), 1e-6), same(one.bias, mirror.bias.detach(), 1e-6)


# Data.


def test_the_parts_of_a_data_set_are_contiguous_and_of_one_length():
    parts = [list(SplitSampler(11, 3, part, shuffle=False)) for part in range(3)]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    parts = [list(SplitSampler(11, 3, part, shuffle=False, drop_last=False)) for part in range(3)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0]]


def test_a_seed_makes_the_orders_of_every_run_the_same_and_of_every_epoch_another():
    one, other = (SplitSampler(100, 2, 1, seed=4) for _ in range(2))
    epochs = [list(one) for _ in range(3)]
    assert epochs == [list(other) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3 and all(sorted(e) == list(range(50, 100)) for e in epochs)
    other.set_epoch(1)
    assert list(other) == epochs[1]
    assert SplitSampler(100, 2, 1, seed=4).epoch == 0 and len(one) == 50
    again = SplitSampler(100, 2, 1, seed=4)
    begun = iter(again)
    visited = [next(begun) for _ in range(20)]
    later = SplitSampler(100, 2, 1, seed=4)
    later.load_state_dict(again.state_dict())
    assert visited + list(later) == epochs[0] and list(later) == epochs[1]


def test_a_batch_is_split_over_devices_as_gluon_does():
    parts = kvdist.split_data(torch.arange(7), 3, even_split=False)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError):
        kvdist.split_data(torch.arange(7), 3)
    assert [part.tolist() for part in kvdist.split_and_load(np.arange(4), ["cpu", "cpu"])] == [[0, 1], [2, 3]]
