"""Optimizers over all ranks against one process that has all data, and the cases of Horovod's own tests."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kvdist
import kvdist.collective as hvd
from tests.cases import each
from tests.collective.models import adam, alike, batch_of, loss_of, making, model_of, sgd, weights_of
from tests.collective.ranks import returned, run_ranks


def alone(make, size, steps=5, sizes=(4, 5, 2), scale=1.0):
    """The weights after training on the batches of all ranks."""
    model = model_of(*sizes)
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, batch_of(rank)) for rank in range(size)) / size * scale).backward()
        optimizer.step()
    return weights_of(model)


def train(rank, make, steps=5, sizes=(4, 5, 2), **options):
    model = model_of(*sizes)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(rank)).backward()
        optimizer.step()
    return weights_of(model)


# Training.


@each("make", [sgd, adam])
@each("size", [1, 3])
def test_ranks_train_as_one_process_with_all_their_batches(make, size):
    alike(returned(run_ranks(size, train, make)), alone(make, size))


@each(
    "options, scale",
    [
        ({"op": hvd.Sum}, 2.0),
        ({"gradient_predivide_factor": 4.0}, 1.0),
        ({"groups": 2}, 1.0),
        ({"groups": 100}, 1.0),
        ({"sparse_as_dense": True}, 1.0),
    ],
)
def test_options_change_how_gradients_travel_and_not_what_they_are(options, scale):
    weights = returned(run_ranks(2, lambda rank: train(rank, sgd, **options)))
    alike(weights, alone(sgd, 2, scale=scale))


@each("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compressed_gradients_keep_their_dtype_and_are_a_little_less_exact(compression):
    weights = returned(run_ranks(2, lambda rank: train(rank, sgd, compression=compression)))
    assert weights[0].dtype == torch.float32 and not torch.equal(weights[0], alone(sgd, 2))
    alike(weights, alone(sgd, 2), rtol=0.05, atol=0.02)


def test_parameters_may_be_grouped_by_name_and_large_ones_travel_from_where_they_are():
    sizes = (4, 70_000, 2)  # more than is ever packed

    def program(rank):
        model = model_of(*sizes)
        groups = [[model[0].bias, model[1].weight], [model[0].weight]]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), groups=groups)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank)).backward()
            optimizer.step()
        return weights_of(model)

    def make(parameters):
        return torch.optim.SGD(parameters, lr=1e-6)

    alike(returned(run_ranks(2, program)), alone(make, 2, steps=2, sizes=sizes), rtol=1e-4)


def test_gradients_leave_while_the_backward_pass_still_runs():
    seen = {0: [], 1: []}

    def program(rank):
        model = model_of(4, 5, 2)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), groups=4)
        for _ in range(2):
            hidden = model[0](batch_of(rank))
            hidden.register_hook(lambda _: seen[rank].append(len(optimizer._reducers[0]._under_way)))
            model[1](hidden).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    returned(run_ranks(2, program))
    # Not in the first step, in which ranks agree on what is sparse; in the second the last layer has left already.
    assert seen == {0: [0, 2], 1: [0, 2]}


# Tensors passes.


def test_four_passes_add_up_before_each_of_ten_steps():
    def program(rank):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=4)
        seen = []
        for _ in range(10):
            optimizer.zero_grad()
            for _ in range(4):
                (-weight * (2.0 * rank)).sum().backward()  # the average over two ranks is 1
            optimizer.step()
            seen.append(weight[0].item())
        return seen

    assert returned(run_ranks(2, program)) == [[4.0 * step for step in range(1, 11)]] * 2


def test_the_number_of_passes_may_change_and_too_many_are_an_error():
    def program(rank):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("scale", weight)])
        optimizer.set_backward_passes_per_step(2)
        for _ in range(2):
            (-weight).sum().backward()
        with pytest.raises(AssertionError, match=r"gradient of scale was computed more than .* \(2\) times"):
            (-weight).sum().backward()
        with pytest.raises(AssertionError, match=r"set_backward_passes_per_step\(\) was called after"):
            optimizer.set_backward_passes_per_step(1)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return weight.item()

    assert returned(run_ranks(2, program)) == [3.0, 3.0]  # the gradient that came too late was added all the same


def test_a_gradient_that_comes_in_parts_within_a_pass_is_refused_with_a_remedy_that_works():
    def program(rank):
        net = nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())

        def step(use_reentrant):
            x = torch.ones(1, 2, requires_grad=True)
            for _ in range(2):
                x = checkpoint(net, x, use_reentrant=use_reentrant)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with pytest.raises(AssertionError, match="a checkpoint with use_reentrant=True.*: set use_reentrant=False"):
            step(True)
        optimizer.step()
        optimizer.zero_grad()
        step(False)

    returned(run_ranks(2, program))


# Parameters that not every rank uses.


def test_ranks_may_use_different_heads_of_a_model():
    def program(rank):
        trunk, heads = model_of(4, 3), [model_of(3, 2, seed=1), model_of(3, 2, seed=2)]
        model = nn.ModuleList([trunk, *heads])
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=6)
        for step in range(4):
            optimizer.zero_grad()
            heads[(rank + step) % 2](trunk(batch_of(rank))).sum().backward()
            optimizer.step()
        return weights_of(model)

    first, second = returned(run_ranks(2, program))
    assert torch.equal(first, second) and first.isfinite().all()


def test_what_has_no_gradient_anywhere_gets_zeros_and_what_is_frozen_gets_none():
    def program(rank):
        used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, frozen], lr=1.0))
        used.sum().backward()
        optimizer.step()
        return unused.grad.tolist(), frozen.grad, used.tolist()

    assert returned(run_ranks(2, program)) == [([0.0, 0.0], None, [0.0, 0.0])] * 2


def test_parameters_may_be_frozen_and_unfrozen_between_steps():
    def program(rank):
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        second.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
        for trained in [(first,), (first, second), (second,), (first, second)]:
            for one in (first, second):
                one.requires_grad_(any(one is other for other in trained))
            optimizer.zero_grad()
            sum((one * -(rank * 2.0)).sum() for one in trained).backward()
            optimizer.step()
            assert all((one.grad is not None) == any(one is other for other in trained) for one in (first, second))
        return first.tolist(), second.tolist()

    assert returned(run_ranks(2, program)) == [([3.0, 3.0], [3.0, 3.0])] * 2


def test_parameters_may_be_added():
    def program(rank):
        first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
        optimizer.add_param_group({"params": [second], "lr": 2.0})
        for _ in range(2):
            optimizer.zero_grad()
            ((first + second) * -(rank * 2.0)).sum().backward()
            optimizer.step()
        return first.item(), second.item()

    assert returned(run_ranks(2, program)) == [(2.0, 4.0)] * 2


def test_two_models_that_train_against_each_other_have_an_optimizer_each():
    def program(rank):
        maker, judge = model_of(4, 4), model_of(4, 1, seed=1)
        of_maker = hvd.DistributedOptimizer(sgd(maker.parameters()), maker.named_parameters())
        of_judge = hvd.DistributedOptimizer(sgd(judge.parameters()), judge.named_parameters())
        for trains_maker, trains_judge in [(True, False), (False, True), (True, True)] * 2:
            maker.requires_grad_(trains_maker)
            judge.requires_grad_(trains_judge)
            of_maker.zero_grad()
            of_judge.zero_grad()
            judge(maker(batch_of(rank))).sum().backward()
            if trains_maker:
                of_maker.step()
            if trains_judge:
                of_judge.step()
        return torch.cat([weights_of(maker), weights_of(judge)])

    first, second = returned(run_ranks(2, program))
    assert torch.equal(first, second)


def test_a_rank_without_more_batches_joins_and_the_others_train_on():
    def program(rank):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("scale", weight)])
        for _ in range(2 + 3 * rank):
            optimizer.zero_grad()
            (-weight * 2.0).sum().backward()
            optimizer.step()
        return hvd.join(), weight[0].item()

    # Two steps of 2 together; the three of one rank alone are divided by the number of all.
    assert returned(run_ranks(2, program)) == [(1, 4.0), (1, 7.0)]


# Between the backward pass and the step.


def test_gradients_may_be_clipped_between_synchronize_and_step():
    def program(rank):
        model = model_of(4, 2)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(model, batch_of(rank)) * 100).backward()
            optimizer.synchronize()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with optimizer.skip_synchronize():
                    optimizer.step()
        return norms, weights_of(model)

    (norms, weights), (other_norms, other_weights) = returned(run_ranks(2, program))
    assert norms == other_norms and min(norms) > 0.5 and torch.equal(weights, other_weights)


def test_a_step_after_synchronize_warns_that_it_reduces_twice():
    def program(rank):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        (-weight).sum().backward()
        optimizer.synchronize()
        optimizer.step()
        return weight.item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert returned(run_ranks(2, program)) == [4.0, 4.0]
    # Beside it there may be what the garbage of other tests warns of when it is collected just now.
    assert sum("called without optimizer.skip_synchronize()" in str(one.message) for one in caught) == 2


def test_zeroing_gradients_that_are_under_way_is_an_error():
    def program(rank):
        model = model_of(4, 2)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        optimizer.zero_grad()
        loss_of(model, batch_of(rank)).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
            optimizer.zero_grad()
        with optimizer.skip_synchronize(), pytest.raises(AssertionError, match="needs optimizer.synchronize"):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        return weights_of(model)

    first, second = returned(run_ranks(2, program))
    assert torch.equal(first, second)


@each("elements", [3, 200_000])
def test_changing_a_gradient_that_is_under_way_is_an_error(elements):
    def program(rank):
        weight = nn.Parameter(torch.ones(elements))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("scale", weight)], sparse_as_dense=True
        )
        weight.sum().backward()
        nn.utils.clip_grad_norm_([weight], 0.1)
        with pytest.raises(RuntimeError, match=r"gradient of scale was changed while .*call optimizer.synchronize\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        return weight.unique().tolist()

    assert returned(run_ranks(2, program)) == [[0.0]] * 2


# What Horovod's optimizer has.


def test_ranks_outside_the_process_set_step_by_their_own_gradients():
    def program(rank):
        pair = hvd.add_process_set([0, 2])
        weight = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pair)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * (rank + 1)).sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            (weight * (rank + 1)).sum().backward()
            optimizer.step()
        return weight.detach()[0].item()

    # Members have the mean of 1 and 3, rank 1 its own 2; the second pass of a loop adds to the gradient that is there.
    assert returned(run_ranks(3, program)) == [-12.0] * 3


def test_its_options_are_attributes():
    def program(rank):
        pair = hvd.add_process_set([0, 1])
        if rank == 2:
            return None
        weight = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            backward_passes_per_step=2,
            gradient_predivide_factor=2.0,
            sparse_as_dense=True,
            process_set=pair,
        )
        assert (optimizer.op, optimizer.process_set, optimizer.gradient_predivide_factor) == (hvd.Average, pair, 2.0)
        assert (optimizer.sparse_as_dense, optimizer.backward_passes_per_step) == (True, 2)
        optimizer.backward_passes_per_step = 1
        weight.sum().backward()
        optimizer.step()
        return weight.detach()[0].item(), optimizer.backward_passes_per_step

    assert returned(run_ranks(3, program)) == [(-1.0, 1), (-1.0, 1), None]


# Sparse gradients.


def test_gradients_that_travel_dense_are_sparse_again_for_an_optimizer_of_sparse_ones():
    def program(rank):
        with making:
            torch.manual_seed(5)
            table = nn.Embedding(7, 3, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()), sparse_as_dense=True)
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([rank, 3, step])).square().sum().backward()
            optimizer.step()
        return table.weight.detach()

    def alone():
        torch.manual_seed(5)
        table = nn.Embedding(7, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        for step in range(3):
            optimizer.zero_grad()
            (table(torch.tensor([0, 3, step, 1, 3, step])).square().sum() / 2).backward()
            optimizer.step()
        return table.weight.detach()

    for result in returned(run_ranks(2, program)):
        torch.testing.assert_close(result, alone(), rtol=1e-6, atol=1e-6)


def test_sparse_handles_are_called_as_horovods():
    def program(rank):
        mine = torch.sparse_coo_tensor([[rank, 2]], [1.0, 3.0], (4,), check_invariants=True)
        return hvd.sparse_allreduce_async(mine, name="table", op=hvd.Sum)().to_dense().tolist()

    assert returned(run_ranks(2, program)) == [[1.0, 1.0, 6.0, 0.0]] * 2


def test_sparse_gradients_are_gathered_and_equal_dense_ones():
    def program(rank):
        results = []
        for sparse, options in [(False, {}), (True, {}), (True, {"sparse_as_dense": True})]:
            with making:
                torch.manual_seed(5)
                table, layer = nn.Embedding(7, 3, sparse=sparse), nn.Linear(3, 1)
            parameters = [*table.parameters(), *layer.parameters()]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.5), **options)
            for step in range(3):
                optimizer.zero_grad()
                if (rank, step) == (1, 1):
                    layer(torch.ones(3)).sum().backward()  # this rank does not use the table
                else:
                    layer(table(torch.tensor([rank, rank, 3, step]))).sum().backward()
                optimizer.step()
                assert table.weight.grad.is_sparse == sparse
            results.append(table.weight.detach())
        return results

    first, second = returned(run_ranks(2, program))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, first[0], rtol=1e-6, atol=1e-6)


def test_sparse_gradients_that_cannot_be_reduced_are_refused_before_any_is():
    def program(rank):
        table, bias = nn.Embedding(4, 1, sparse=True), nn.Parameter(torch.zeros(1))
        named = [("table", table.weight), ("bias", bias)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, bias], lr=1.0), named, op=hvd.Max)
        (table(torch.tensor([rank])).sum() + bias * (rank + 1)).sum().backward()
        with pytest.raises(ValueError, match="the gradient of table is sparse, and .* not Max: set sparse_as_dense"):
            optimizer.step()
        return bias.grad.item()

    assert returned(run_ranks(2, program)) == [1.0, 2.0]


class Slow(torch.optim.Optimizer):
    """A wrapper without torch's constructor."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


class Sharing(Slow):
    """A wrapper that has all attributes of the one that it wraps, and its hooks with them."""

    def __init__(self, inner):
        self.__dict__.update(inner.__dict__)
        self.inner = inner


@each("function", [hvd.DistributedOptimizer, hvd.broadcast_optimizer_state])
@each(
    "make, message",
    [
        (
            lambda given: kvdist.optimizer.create("sgd"),
            "takes an optimizer of torch.optim, got kvdist.optimizer.sgd.SGD",
        ),
        (lambda given: None, "takes an optimizer of torch.optim, got builtins.NoneType"),
        (lambda given: Slow(sgd(given)), "Slow does not call torch.optim.Optimizer.__init__"),
    ],
)
def test_what_is_no_whole_optimizer_of_torch_is_refused_by_its_name(function, make, message):
    def program(rank):
        with pytest.raises(TypeError, match=re.escape(message)):
            function(make([nn.Parameter(torch.ones(1))]))

    returned(run_ranks(2, program))


@each("wraps_last", [True, False])
@each("op", [hvd.Average, hvd.Adasum])
@each("wrapper", [Slow, Sharing])
def test_a_wrapped_optimizer_trains(wraps_last, op, wrapper):
    def program(rank):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        if wraps_last:
            optimizer = wrapper(hvd.DistributedOptimizer(optimizer, op=op))
        else:
            optimizer = hvd.DistributedOptimizer(Sharing(optimizer), op=op)
        (weight * (rank + 1)).sum().backward()
        optimizer.step()
        return weight.item()

    expected = 1 - 0.5 * 1.5
    for weight in returned(run_ranks(2, program)):
        assert weight == pytest.approx(expected)
