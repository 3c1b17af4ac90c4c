"""What makes ranks start alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvdist.collective as hvd
from kvdist.errors import CollectiveMismatch
from tests.cases import each
from tests.collective.ranks import returned, run_ranks

KNOWS_NAMES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def model_of(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())


def numbers_of(model):
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_parameters_and_buffers_become_those_of_the_root():
    models = [model_of(rank) for rank in range(2)]

    def program(rank):
        models[rank][1].num_batches_tracked += rank
        hvd.broadcast_parameters(models[rank].state_dict(), root_rank=1)

    returned(run_ranks(2, program))
    assert numbers_of(models[0]) == numbers_of(models[1])
    assert numbers_of(models[1]) != numbers_of(model_of(1))  # the counter
    assert models[0][1].num_batches_tracked == 1 and models[0][0].weight.requires_grad


def test_parameters_may_be_given_in_every_way_that_models_give_them():
    models = [model_of(rank) for rank in range(2)]

    def program(rank):
        first, _, last = models[rank]
        hvd.broadcast_parameters(first.named_parameters(), root_rank=0)
        hvd.broadcast_parameters([*last.parameters(), None])
        hvd.broadcast_parameters({})
        # Dictionaries go by their names, in whatever order they were filled.
        names = ["b", "a"] if rank else ["a", "b"]
        mine = {name: torch.full((2,), rank + (0.5 if name == "a" else 0.0)) for name in names}
        hvd.broadcast_parameters(mine)
        return mine["a"].tolist(), mine["b"].tolist()

    assert returned(run_ranks(2, program)) == [([0.5, 0.5], [0.0, 0.0])] * 2
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@each("given", [list, iter, dict])
@each("order", ["acbd", "dcba", "bcda"])
def test_named_parameters_are_those_of_the_same_name_on_the_root(given, order):
    def program(rank):
        mine = [(name, torch.full((2,), ord(name) + 100.0 * rank)) for name in (order if rank else "abcd")]
        hvd.broadcast_parameters(given(mine))
        return {name: chr(int(tensor[0])) for name, tensor in mine}

    assert returned(run_ranks(2, program)) == [{name: name for name in "abcd"}] * 2


@each("given", [list, dict])
@each("names", ["axcd", "abc", "xbcd", "abxx"])
def test_ranks_whose_parameters_have_other_names_are_told(given, names):
    def program(rank):
        hvd.broadcast_parameters(given([(name, torch.zeros(2)) for name in (names if rank else "abcd")]))

    for error in run_ranks(2, program):
        assert isinstance(error, CollectiveMismatch) and "broadcast 'a to d, in the order " in str(error)


def test_what_is_no_tensor_is_refused_by_its_name():
    (error,) = run_ranks(1, lambda _: hvd.broadcast_parameters({"weight": torch.ones(1), "epoch": 3}))
    assert isinstance(error, TypeError) and str(error).startswith("epoch is a int")


@each(
    "function",
    [hvd.allreduce_async, hvd.grouped_allreduce_async_, hvd.allreduce_, hvd.broadcast_, hvd.broadcast_async],
)
def test_wrong_arguments_are_those_of_the_function_that_was_called(function):
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing \d required positional"):
        function()
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'nme'"):
        function(torch.ones(1), nme="a")


OPTIMIZERS = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"betas": (0.8, 0.9), "amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def step(optimizer, model):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def flat(value):
    """A state as lists and numbers, for comparing."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


@each("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_becomes_that_of_the_root(name):
    def program(rank):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        options = {**OPTIMIZERS[name], "lr": 0.125 if rank == 0 else 0.5}
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        if rank == 0:  # only the root has been trained, or restored
            step(optimizer, model)
            step(optimizer, model)
        hvd.broadcast_parameters(model.state_dict())
        weights = flat(dict(model.named_parameters()))
        hvd.broadcast_optimizer_state(optimizer)
        assert flat(dict(model.named_parameters())) == weights  # nothing moves
        state = flat(optimizer.state_dict())
        step(optimizer, model)
        return state, flat(dict(model.named_parameters()))

    (state, weights), (other_state, other_weights) = returned(run_ranks(2, program))
    assert state == other_state and state["param_groups"][0]["lr"] == 0.125
    assert weights == other_weights


def test_an_optimizer_without_state_gets_the_options_of_the_root_all_the_same():
    def program(rank):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(
            [{"params": [model.weight], "lr": 0.1 * (rank + 1)}, {"params": [model.bias], "weight_decay": 0.5 * rank}],
            lr=1.0 + rank,
            nesterov=bool(rank),
            momentum=0.9 if rank else 0.0,
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return [
            (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"])
            for group in optimizer.param_groups
        ]

    assert returned(run_ranks(2, program)) == [[(0.2, 0.9, True, 0), (2.0, 0.9, True, 0.5)]] * 2


def named_sgd(groups):
    """SGD of parameters with names; the momentum of each, and its gradient, are the code of its name."""
    named = {name: nn.Parameter(torch.zeros(2)) for name in groups.replace(" ", "")}
    members = [{"params": [(name, named[name]) for name in names]} for names in groups.split()]
    for name, parameter in named.items():
        parameter.grad = torch.full((2,), float(ord(name)))
    return torch.optim.SGD(members, lr=0.1, momentum=0.9), named


@pytest.mark.skipif(not KNOWS_NAMES, reason="optimizers of this torch know no names of parameters")
@each("groups", ["ab cd", "ba cd", "ba dc"])
def test_the_state_of_a_parameter_is_that_of_the_one_of_its_name(groups):
    def program(rank):
        optimizer, named = named_sgd(groups if rank else "ab cd")
        if rank == 0:
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer)
        momenta = {name: chr(int(optimizer.state[one]["momentum_buffer"][0])) for name, one in named.items()}
        return momenta, " ".join("".join(group["param_names"]) for group in optimizer.param_groups)

    names = {name: name for name in "abcd"}
    assert returned(run_ranks(2, program)) == [(names, "ab cd"), (names, groups)]


@pytest.mark.skipif(not KNOWS_NAMES, reason="optimizers of this torch know no names of parameters")
@each("groups", ["cd ab", "ax cd", "ac bd"])
def test_an_optimizer_whose_parameters_have_other_names_is_refused(groups):
    _, error = run_ranks(2, lambda rank: hvd.broadcast_optimizer_state(named_sgd(groups if rank else "ab cd")[0]))
    assert isinstance(error, ValueError) and "group 0 of the optimizer has different parameters" in str(error)


def test_gradients_are_zeros_afterwards_where_the_optimizer_was_new():
    """As after Horovod's function, which takes a step with them; sparse ones where the model says so."""

    def program(rank):
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        table, *rest = [one.grad for one in model.parameters()]
        return table.is_sparse, table.to_dense().any().item(), [one.count_nonzero().item() for one in rest]

    assert returned(run_ranks(2, program)) == [(True, False, [0, 0])] * 2


def test_metrics_are_averaged():
    def program(rank):
        return hvd.metric_average(0.1 * rank, name="loss"), hvd.metric_average(torch.tensor([rank]))

    assert returned(run_ranks(3, program)) == [(pytest.approx(0.1), 1.0)] * 3
