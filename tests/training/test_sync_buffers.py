"""`sync_buffers`: what it takes and refuses; with several workers it is tested on clusters."""

from __future__ import annotations

import pytest
import torch

from kvdist import kv, sync_buffers
from tests.cases import each
from tests.kvstore.test_adapter import Mine


def network():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).half())
    net.register_buffer("flag", torch.tensor(True))
    net.register_buffer("none", torch.zeros(0))
    return net


@each("name", ["local", "dist"])
@each("samples", [None, 0, 7])
def test_one_worker_keeps_its_buffers_in_place(name, samples):
    net = network()
    net[1].running_mean.fill_(3)
    net[1].num_batches_tracked.fill_(5)
    before = {key: (value, value.clone()) for key, value in net.state_dict(keep_vars=True).items()}
    with kv.create(name) as store:
        sync_buffers(net, store, samples=samples)
    for key, value in net.state_dict(keep_vars=True).items():
        assert value is before[key][0] and torch.equal(value, before[key][1])


def test_a_network_without_buffers_needs_nothing():
    with kv.create("local") as store:
        sync_buffers(torch.nn.Linear(2, 2), store)


def test_another_kind_of_store_is_refused():
    with pytest.raises(TypeError, match="sync_buffers needs a store of kvdist, such as kv.create.*, not Mine"):
        sync_buffers(network(), Mine())


@each(
    "samples, error, said",
    [(-1, ValueError, "samples is -1; it is"), (2.5, TypeError, "float"), (True, ValueError, "is True")],
)
def test_samples_that_are_no_number_of_examples_are_refused_before_anything_is_changed(samples, error, said):
    with kv.create("local") as store, pytest.raises(error, match=said):
        sync_buffers(network(), store, samples=samples)


@pytest.mark.filterwarnings("ignore:torch.quantize")
@each(
    "make, words",
    [
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), r"\.resolve_conj\(\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"\.dequantize\(\)"),
        (lambda: torch.eye(2).to_sparse(), r"\.to_dense\(\)"),
        (lambda: torch.ones(2, device="meta"), "to_empty"),
        (lambda: torch.nn.UninitializedBuffer(), "without a shape"),
    ],
)
def test_a_buffer_whose_memory_is_not_its_elements_is_refused_by_its_name(make, words):
    net = network()
    net[1].register_buffer("mask", make())
    with kv.create("local") as store, pytest.raises(TypeError, match=rf"^the buffer 1\.mask cannot .*{words}"):
        sync_buffers(net, store)
