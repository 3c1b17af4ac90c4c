"""Distributed optimizers with the rest of torch: closures, schedulers, scalers, copies; Adasum; and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import kvdist.collective as hvd
from kvdist.errors import CollectiveMismatch, ConfigError
from tests.cases import each
from tests.collective.models import adam, alike, batch_of, loss_of, model_of, sgd, weights_of
from tests.collective.ranks import returned, run_ranks


def test_closures_have_their_gradients_reduced_and_their_losses_averaged():
    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def run(optimizer, losses, model):
        def closure():
            optimizer.zero_grad()
            loss = losses(model)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)]

    def program(rank):
        model = model_of(4, 3, 2)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()))
        return run(optimizer, lambda one: loss_of(one, batch_of(rank)), model), weights_of(model)

    model = model_of(4, 3, 2)
    losses = run(make(model.parameters()), lambda one: sum(loss_of(one, batch_of(rank)) for rank in (0, 1)) / 2, model)
    (found, weights), (others, other_weights) = returned(run_ranks(2, program))
    assert found == others == pytest.approx(losses, rel=1e-4)
    alike([weights, other_weights], weights_of(model), rtol=1e-3, atol=1e-4)


@each("is_before", [True, False])
def test_schedulers_work_whether_they_are_made_before_or_after(is_before):
    def program(rank):
        model = model_of(4, 2)
        optimizer = sgd(model.parameters())
        if not is_before:
            optimizer = hvd.DistributedOptimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if is_before:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank)).backward()
            optimizer.step()
            scheduler.step()
        return optimizer.param_groups[0]["lr"], weights_of(model)

    (rate, weights), (_, others) = returned(run_ranks(2, program))
    assert rate == pytest.approx(0.0125) and torch.equal(weights, others)


def test_a_scaler_of_gradients_skips_the_same_steps_on_all_ranks():
    def program(rank):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if (rank, step) == (1, 1) else 2.0 * rank
            scaler.scale((-weight * factor).sum()).backward()
            if step == 3:  # by hand, to clip
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_([weight], 0.5)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return weight.tolist(), scales

    assert returned(run_ranks(2, program)) == [([2.5, 2.5], [8.0, 4.0, 4.0, 4.0])] * 2


def test_the_optimizer_stays_what_it_is():
    def program(rank):
        model = model_of(4, 2)
        plain = adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        assert optimizer is plain and isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam" and type(plain) is not torch.optim.Adam
        loss_of(model, batch_of(rank)).backward()
        copied = copy.deepcopy(model)  # an average of weights, say, which has no part in this
        loss_of(copied, batch_of(rank)).backward()
        optimizer.step()
        saved = optimizer.state_dict()
        later = hvd.DistributedOptimizer(adam(model.parameters()))
        later.load_state_dict(saved)
        for one in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match=r"use its state_dict\(\)"):
                one(optimizer)
        for one in (optimizer, later):
            one.zero_grad()
        return later.state_dict()["state"][0]["step"].item()

    assert returned(run_ranks(2, program)) == [1.0, 1.0]


# Adasum.


def test_adasum_combines_what_the_ranks_own_steps_change():
    def program(rank):
        weight = nn.Parameter(torch.tensor([1.0, 1.0, 5.0]))
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, frozen], lr=0.5), op=hvd.Adasum)
        (weight[rank] * 2).backward()  # orthogonal: steps add up
        optimizer.step()
        optimizer.zero_grad()
        (weight[2] * (2 + 4 * rank)).backward()  # parallel: steps of 1 and 3 are averaged
        optimizer.step()
        optimizer.synchronize()
        with pytest.raises(AssertionError, match="not possible with Adasum"):
            optimizer.skip_synchronize()
        with pytest.raises(RuntimeError, match="GradScaler cannot be used with Adasum"):
            assert optimizer._step_supports_amp_scaling
        return weight.tolist()

    assert returned(run_ranks(2, program)) == [[0.0, 0.0, 3.0]] * 2


# What contradicts itself.


def test_what_contradicts_itself_is_refused():
    model = model_of(2, 2, 2)
    named = list(model.named_parameters())

    def make(**options):
        return hvd.DistributedOptimizer(sgd(model.parameters()), **options)

    def program(_):
        cases = [
            ({"named_parameters": list(model.parameters())}, "must be .name, parameter. pairs"),
            ({"named_parameters": [*named, named[0]]}, "duplicate names: 0.weight"),
            ({"named_parameters": named[1:]}, "1 parameters of the optimizer are not in"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "is for op=Average"),
            ({"backward_passes_per_step": 0}, "at least 1"),
            ({"groups": -1}, "groups is -1"),
            ({"groups": [model[0].weight]}, "list of lists"),
            ({"groups": [[model[0].weight], [model[0].weight]]}, "a parameter twice"),
        ]
        for options, sentence in cases:
            with pytest.raises(ValueError, match=sentence):
                make(**options)
        with pytest.raises(NotImplementedError, match="not on a process set"):
            make(op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(make())
        with pytest.warns(DeprecationWarning, match="has been replaced by `groups`"):
            make(num_groups=2)

    returned(run_ranks(1, program))


def test_every_parameter_has_a_name_of_its_own_also_where_none_are_given():
    model = model_of(2, 2, 2)
    groups = [{"params": layer.parameters()} for layer in model]
    named = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    assert named._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
    assert plain._parameter_names.keys() == named._parameter_names.keys()
    assert len(set(plain._parameter_names.values())) == 4


def test_without_init_the_first_step_says_what_to_call():
    model = model_of(2, 2)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ConfigError, match=r"use hvd.init\(\)"):
        optimizer.step()


@each("order", [[1, 0], [0, 2, 1, 3], [3, 1, 2, 0]])
def test_ranks_that_list_their_named_parameters_in_another_order_are_told(order):
    def program(rank):
        named = [(f"layer{number}", nn.Parameter(torch.full((2,), float(number)))) for number in sorted(order)]
        named = [named[place] for place in order] if rank else named
        optimizer = hvd.DistributedOptimizer(sgd([parameter for _, parameter in named]), named_parameters=named)
        sum(parameter.sum() for _, parameter in named).backward()
        optimizer.step()

    for error in run_ranks(2, program):
        assert isinstance(error, CollectiveMismatch) and "gradients of layer" in str(error)
