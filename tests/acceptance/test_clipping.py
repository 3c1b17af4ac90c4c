"""Clipping by a global norm where servers update: the steps of torch, whatever lies between workers and servers."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from kvdist import OptimizerMismatch, Trainer, kv
from kvdist.kvstore.rowsparse import RowSparse
from tests.acceptance.together import Together, same

CUT = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}
summed_on_the_host = Together(2, 1, **CUT, KVDIST_LOCAL_REDUCE="on")
over_tcp = Together(2, 3, **CUT, KVDIST_TRANSPORT="tcp")
four = Together(4, 3, **CUT)

SHAPES = [(3,), (50, 40), (1,), (200, 100), (7, 3)]
"""The second and the fourth are cut over the servers; a slice of the fourth goes alone."""
CLIP, STEPS, WITHIN = 30.0, 8, 1e-6
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def gradients(step, rank):
    """Of two arrays a worker, for each parameter. Steps 2 and 5 are below the norm."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    scale = 0.01 if step % 3 == 2 else 1.0
    return [[scale * torch.randn(shape, generator=generator) for _ in range(2)] for shape in SHAPES]


def parameters():
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator) / 3) for shape in SHAPES]


def check_steps_of_torch(store, without=()):
    """Mean gradients of two replicas a worker; the workers in `without` have none in step 3."""
    theirs, ours = parameters(), [parameters(), parameters()]
    torch_optimizer = torch.optim.SGD(theirs, **SGD)
    pairs = zip(*ours, strict=True)
    trainer = Trainer(pairs, "torch.sgd", dict(SGD), kvstore=store, update_on_kvstore=True, clip_norm=CLIP)
    norms = []
    for step in range(STEPS):
        members = [rank for rank in range(store.num_workers) if not (step == 3 and rank in without)]
        every = [gradients(step, rank) for rank in members]
        for position, parameter in enumerate(theirs):
            parameter.grad = sum(sum(grads[position]) for grads in every) / (2 * store.num_workers)
        norm = nn.utils.clip_grad_norm_(theirs, CLIP)
        torch_optimizer.step()
        if store.rank in members:
            for position, both in enumerate(gradients(step, store.rank)):
                for replica, grad in zip(ours, both, strict=True):
                    replica[position].grad = grad
            trainer.step()
        else:
            trainer.skip_step()
        norms.append(trainer.grad_norm)
        assert norms[-1] == pytest.approx(float(norm), rel=1e-6)
    assert min(norms) < CLIP < max(norms)
    for replica in ours:
        for own, other in zip(replica, theirs, strict=True):
            same(own, other.detach().double().numpy(), WITHIN)
    bits = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in ours[0]))
    store.agree(f"{norms} {bits.hexdigest()}")


@summed_on_the_host
def test_with_one_server_and_pushes_that_a_host_sums(store):
    check_steps_of_torch(store)


@over_tcp
def test_with_three_servers_over_tcp(store):
    check_steps_of_torch(store, without=(1,))


@pytest.mark.slow
@four
def test_with_four_workers_and_three_servers(store):
    check_steps_of_torch(store, without=(0, 3))


@over_tcp
def test_rules_with_norms_of_whole_parameters_follow(store):
    """LARS: clipping changes the ratio of the gradient's length to that of the decay."""
    weights, clip = np.ones(2000, np.float32), 0.5
    grad = np.arange(2000, dtype=np.float32) / 2000
    results = []
    for factor in (None, clip / (float(np.linalg.norm(2 * grad)) + 1e-6)):
        with kv.create("dist") as own:
            own.set_optimizer("lars", learning_rate=1.0, wd=0.5, eta=1.0)
            own.init("w", weights)
            out = np.empty_like(weights)
            if factor is None:
                own.pushpull_clipped("w", grad, clip, out)
            else:
                own.pushpull("w", grad * np.float32(factor), out)
            results.append(out)
    same(results[0], results[1], 1e-6)


@summed_on_the_host
def test_compressed_sums_are_clipped(store):
    store.set_gradient_compression({"type": "fp16"})
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", np.zeros(100, np.float32))
    out = np.empty(100, np.float32)
    grad = np.full(100, 0.5 + store.rank, np.float32)  # no rounding: a sum of 2
    assert store.pushpull_clipped("w", grad, 5.0, out) == 20
    same(out, np.full(100, -0.5), WITHIN)


@summed_on_the_host
def test_a_norm_that_is_not_finite_is_an_error_of_all_and_nothing_is_updated(store):
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(["a", "b"], [np.zeros(3, np.float32), np.zeros(2000, np.float32)])
    given, out = [np.ones(3, np.float32), np.ones(2000, np.float32)], [np.empty(3), np.empty(2000)]
    for wrong in (math.nan, math.inf):
        given[1][7] = wrong if store.rank == 1 else 1.0
        with pytest.raises(FloatingPointError, match=f"norm of the gradients is {wrong}.*no weight was updated"):
            store.pushpull_clipped(["a", "b"], given, 1.0, out)
        for one in store.pull(["a", "b"]):
            same(one, np.zeros(len(one)))
    given[1][7] = 1.0
    assert store.pushpull_clipped(["a", "b"], given, math.inf, out) == pytest.approx(2 * math.sqrt(2003))
    same(out[1], np.full(2000, -2.0))


@summed_on_the_host
def test_a_norm_that_overflows_float32_is_finite(store):
    store.init("w", np.zeros(2, np.float32))
    out = np.empty(2, np.float32)
    norm = store.pushpull_clipped("w", np.full(2, 1e30, np.float32), 1.0, out)
    assert norm == pytest.approx(2e30 * math.sqrt(2))
    same(out, np.full(2, math.sqrt(0.5)), WITHIN)


@summed_on_the_host
def test_what_cannot_be_clipped_is_refused(store):
    store.init("w", np.zeros(3, np.float32))
    out, grad = np.empty(3, np.float32), np.ones(3, np.float32)
    with pytest.raises(OptimizerMismatch, match="worker-1 multiplies by.*same clip_norm"):
        store.pushpull_clipped("w", grad, 1.0 + store.rank, out)
    with pytest.raises(ValueError, match="clip_norm is 0; the largest norm"):
        store.pushpull_clipped("w", grad, 0, out)
    store.init("table", RowSparse([0], np.zeros((1, 2), np.float32), (4, 2)))
    with pytest.raises(TypeError, match="'table' is a table of rows"):
        store.pushpull_clipped(["w", "table"], [grad, grad], 1.0, [out, out])
    assert store.pushpull_clipped("w", grad, 1.0, out) == pytest.approx(2 * math.sqrt(3))


def test_stores_that_do_not_sum_before_they_update_refuse_it():
    for name in ("dist_async", "local"):
        with kv.create(name) as store:
            store.init("w", np.zeros(3, np.float32))
            with pytest.raises(NotImplementedError, match=f"the store '{name}' does not clip"):
                store.pushpull_clipped("w", np.ones(3, np.float32), 1.0, np.empty(3))


BETWEEN = """
    import os
    import numpy as np
    from kvdist import kv
    from kvdist.kvstore import clipping
    with kv.create("dist") as store:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", np.zeros(3, np.float32))
        if store.rank == 1:
            clipping.norm_of = lambda runs: os.kill(os.getpid(), 9)  # what every worker asks between the two pushes
        store.pushpull_clipped("w", np.ones(3, np.float32), 1.0, np.empty(3, np.float32))
"""


def test_a_worker_that_dies_between_the_two_pushes_is_named(job, script):
    job.launch(2, 2, script(BETWEEN))
    assert any(job.finish().values())
    job.match("launcher", ".*PeerLostError: worker-1 .* was lost, .*: killed by signal 9.*")
