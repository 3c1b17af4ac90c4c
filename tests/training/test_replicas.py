"""`replicate`: a network on several devices. Here all devices are the CPU, named several times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvdist
from kvdist import DeviceError, Replicas, Trainer, kv, replicate, split_and_load, sync_buffers
from tests.cases import each

torch.set_num_threads(1)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(devices, kvstore, steps=4, batch=8):
    """Weights after some steps whose gradients are integers, as products of small integers are."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    nets = replicate(net, devices)
    store = kv.create(kvstore)
    trainer = Trainer(nets.named_parameters(), "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore=store)
    for _ in range(steps):
        data = split_and_load(torch.randint(-3, 4, (batch, 6)).float(), devices)
        weights = split_and_load(torch.randint(-3, 4, (batch, 3)).float(), devices)
        nets.zero_grad()
        losses = [(net(x) * y).sum() for net, x, y in zip(nets, data, weights, strict=True)]
        for loss in losses:
            loss.backward()
        trainer.step(batch)
    store.close()
    for replicas in nets.parameters():
        assert all(torch.equal(replicas[0], other) for other in replicas[1:])
    return [parameter.detach() for parameter in net.parameters()]


@each("kvstore", ["device", "dist_device_sync"])
def test_two_devices_with_half_a_batch_each_make_the_bits_of_one_with_the_whole(kvstore):
    one, two, four = (train(["cpu"] * count, kvstore) for count in (1, 2, 4))
    assert any(parameter.abs().max() > 4 for parameter in one)
    for first, second, fourth in zip(one, two, four, strict=True):
        assert torch.equal(first, second) and torch.equal(first, fourth)


def test_the_first_replica_is_the_network_itself_and_the_others_are_copies():
    net = network()
    before = list(net.parameters())
    nets = replicate(net, ["cpu", torch.device("cpu"), "cpu"])
    assert isinstance(nets, Replicas) and len(nets) == 3 and nets[0] is net and nets[1:] == list(nets)[1:]
    for parameter, replicas in zip(before, nets.parameters(), strict=True):
        assert replicas[0] is parameter
        assert len({one.data_ptr() for one in replicas}) == 3
        assert all(torch.equal(parameter, one) and one.grad is None for one in replicas)
    names = [name for name, _ in nets.named_parameters()]
    assert names == [name for name, _ in net.named_parameters()]


def test_what_is_tied_or_frozen_is_so_in_every_replica():
    net = network()
    net[0].weight.requires_grad_(False)
    net.append(nn.Linear(4, 2))
    net[3].weight = net[2].weight
    nets = replicate(net, ["cpu", "cpu"])
    assert nets[1][3].weight is nets[1][2].weight is not net[2].weight
    assert not nets[1][0].weight.requires_grad and nets[1][0].bias.requires_grad
    assert [name for name, _ in nets.named_parameters()].count("3.weight") == 0
    trainer = Trainer(nets.named_parameters(), "sgd", {"learning_rate": 1.0}, kvstore=kv.create("device"))
    for one in nets:
        (one[0](torch.ones(1, 5)).sum() + one[2].weight.sum()).backward()
    frozen, tied = net[0].weight.clone(), net[2].weight.detach().clone()
    trainer.step(1)
    for one in nets:
        assert torch.equal(one[0].weight, frozen) and torch.equal(one[2].weight, tied - 2)


def test_all_replicas_are_put_into_a_mode_loaded_and_cleared_together():
    nets = replicate(network(), ["cpu", "cpu"])
    nets.eval()
    assert not any(module.training for net in nets for module in net.modules())
    nets.train()
    assert all(module.training for net in nets for module in net.modules())
    for net in nets:
        net(torch.ones(2, 5)).sum().backward()
    nets.zero_grad()
    assert all(parameter.grad is None for replicas in nets.parameters() for parameter in replicas)
    state = {name: torch.full_like(value, 2) for name, value in nets.state_dict().items()}
    nets.load_state_dict(state)
    assert all(bool((value == 2).all()) for net in nets for value in net.state_dict().values())
    with pytest.raises(RuntimeError, match=r"Missing key"):
        nets.load_state_dict({})


@each("kvstore", [None, "dist"])
def test_buffers_become_the_mean_over_the_devices_and_counts_the_first_ones(kvstore):
    nets = replicate(network().half() if kvstore is None else network(), ["cpu", "cpu"])
    for number, net in enumerate(nets):
        net[1].running_mean.fill_(2 + 3 * number)
        net[1].num_batches_tracked.fill_(number)
    places = [net[1].running_mean.data_ptr() for net in nets]
    store = None if kvstore is None else kv.create(kvstore)
    sync_buffers(nets, store)
    if store is not None:
        store.close()
    assert [net[1].running_mean.tolist() for net in nets] == [[3.5] * 4] * 2
    assert [int(net[1].num_batches_tracked) for net in nets] == [0, 0]
    assert [net[1].running_mean.data_ptr() for net in nets] == places


def test_a_plain_network_without_a_store_is_refused_by_sync_buffers():
    with pytest.raises(TypeError, match="needs a store of kvdist.*not NoneType"):
        sync_buffers(network(), None)


@each(
    "devices, error, said",
    [
        ([], ValueError, "devices is empty; name at least one"),
        ("cpu", TypeError, r"devices is a list, one for each replica.*not 'cpu'"),
        (torch.device("cpu"), TypeError, "devices is a list"),
        (["cpu", "gpu0"], TypeError, "'gpu0' is not a device; name one such as 'cuda:0'"),
        (["cpu", None], TypeError, "None is not a device"),
        (["cpu", "meta"], ValueError, "a network on the device 'meta' has no memory"),
        (["cpu", "cuda:93"], DeviceError, r"the device 'cuda:93' cannot be used here \(.+\): torch sees \d+ CUDA dev"),
    ],
)
def test_devices_that_are_none_are_refused_in_one_sentence_before_anything_is_moved(devices, error, said):
    net = network()
    weight = net[0].weight
    with pytest.raises(error, match=said) as caught:
        replicate(net, devices)
    assert "\n" not in str(caught.value)
    assert net[0].weight is weight


def test_networks_that_cannot_be_replicated_are_refused_with_what_to_do():
    with pytest.raises(TypeError, match=r"takes a network, which is a torch.nn.Module, not list"):
        replicate([network()], ["cpu"])
    with pytest.raises(RuntimeError, match=r"weight, bias has no shape yet.*run one forward pass before replicate"):
        replicate(nn.LazyLinear(2), ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"on the device 'meta' and has no weights yet"):
        replicate(nn.Linear(2, 2, device="meta"), ["cpu"])
    net = network()
    net.cached = net(torch.ones(2, 5))  # the result of a computation, which torch does not copy
    with pytest.raises(ValueError, match=r"cannot be copied \(.*make it once for each device"):
        replicate(net, ["cpu", "cpu"])


def test_a_network_that_is_spread_over_devices_is_refused():
    net = network()
    net[2].to("meta")
    with pytest.raises(ValueError, match="spread over cpu and meta, but a replica must be on a single device"):
        replicate(net, ["cpu", "cpu"])


@pytest.mark.gpu
def test_a_network_is_replicated_on_a_gpu_and_trained_there():
    devices = ["cuda:0", "cuda:0"]
    net = nn.Linear(6, 3)
    nets = kvdist.replicate(net, devices)
    assert all(parameter.is_cuda for replicas in nets.parameters() for parameter in replicas)
    assert net.weight.is_cuda and nets[1].weight.data_ptr() != net.weight.data_ptr()
    on_cpu, on_gpu = train(["cpu"], "device"), train(devices, "device")
    assert all(torch.equal(one, two.cpu()) for one, two in zip(on_cpu, on_gpu, strict=True))
