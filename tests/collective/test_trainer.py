"""A `Trainer` whose workers sum among themselves."""

from __future__ import annotations

import pytest
import torch

from kvdist import InitMismatch, Trainer, kv
from kvdist.buckets import BUCKET_BYTES
from kvdist.checkpoint.shards import updates_in
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


class Branches(torch.nn.Module):
    """Layers of awkward sizes, one of which not every pass uses, and one that none uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 131)
        self.branch = torch.nn.Linear(131, 131, bias=False)
        self.unused = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(131, 3)

    def forward(self, x, with_branch=True):
        x = torch.tanh(self.first(x))
        return self.last(x + self.branch(x) if with_branch else x)


BEGUN = Branches().state_dict()


def begun():
    """A network with the same first weights on each thread, whose random numbers are those of the process."""
    net = Branches()
    net.load_state_dict(BEGUN)
    return net


def weights_of(net):
    return [parameter.detach().clone() for parameter in net.parameters()]


def trained(rank, steps=4, optimizer="adam", branch=lambda rank, step: True, **options):
    """A network after some steps on this rank's own examples."""
    net = begun()
    if rank:
        torch.nn.init.zeros_(net.first.weight)  # rank 0's become everybody's
    trainer = Trainer(net.parameters(), optimizer, {"learning_rate": 0.05}, kvstore="collective", **options)
    random = torch.Generator().manual_seed(rank)
    for step in range(steps):
        net.zero_grad()
        net(torch.randn(5 + rank, 7, generator=random), branch(rank, step)).square().mean().backward()
        trainer.step()
    trainer.close()
    return weights_of(net)


def assert_equal(results, expected=None):
    for result in returned(results):
        for one, other in zip(result, expected or results[0], strict=True):
            assert torch.equal(one, other)


def test_all_workers_have_the_same_weights_and_overlap_gives_the_same_bits():
    assert_equal(run_ranks(3, trained))
    # Of two, that is: a sum of three numbers depends on which two are added first, and that on what travels together.
    plain = run_ranks(2, trained)
    assert_equal(plain)
    assert_equal(run_ranks(2, lambda rank: trained(rank, overlap=True)), plain[0])


def test_a_layer_that_only_one_worker_uses_is_trained_everywhere_and_one_that_nobody_uses_stays():
    def sometimes(rank, step):
        return rank == step % 2

    plain = run_ranks(2, lambda rank: trained(rank, branch=sometimes))
    assert_equal(plain)
    assert not torch.equal(plain[0][2], BEGUN["branch.weight"])
    assert torch.equal(plain[0][3], BEGUN["unused.weight"])
    assert_equal(run_ranks(2, lambda rank: trained(rank, branch=sometimes, overlap=True)), plain[0])


def test_buckets_leave_in_one_order_though_a_worker_leaves_a_layer_out():
    elements = BUCKET_BYTES // 4

    def program(rank):
        layers = [torch.nn.Parameter(torch.ones(elements)) for _ in range(3)]  # each a bucket
        trainer = Trainer(layers, "sgd", {"learning_rate": 1.0}, kvstore="collective", overlap=True)
        for step in range(3):
            used = layers if (rank + step) % 2 else [layers[0], layers[2]]
            for layer in layers:
                layer.grad = None
            sum(float(one + 1) * layer.sum() for one, layer in enumerate(used)).backward()
            trainer.step()
        trainer.close()
        return [layer[0].item() for layer in layers]

    first, second = returned(run_ranks(2, program))
    assert first == second == [1 - 3 * 1.0, 1 - 3 * 1.0, 1 - (2.5 + 2.5 + 2.5)]


def test_it_trains_as_one_worker_with_all_the_examples():
    random = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, 7, generator=random) for _ in range(3)]

    def train(rank, size):
        net = begun()
        rule = {"learning_rate": 0.1, "momentum": 0.9}
        trainer = Trainer(net.parameters(), "sgd", rule, kvstore="collective" if size > 1 else None)
        for batch in batches:
            net.zero_grad()
            net(batch[rank::size]).square().sum().backward()
            trainer.step(8)
        return weights_of(net)

    (alone,) = (train(0, 1),)
    for weights in returned(run_ranks(2, train, 2)):
        for one, other in zip(weights, alone, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@each("store", ["collective", "horovod", "nccl"])
def test_one_worker_needs_no_store(store):
    net = Branches()
    with torch.no_grad():
        expected = [one - 0.5 for one in (net.last.bias,)]
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.5}, kvstore=store)
    net.last(torch.zeros(1, 131)).sum().backward()
    trainer.step()
    assert trainer.kvstore is None
    assert torch.allclose(net.last.bias, expected[0])


def test_a_worker_that_skips_a_step_keeps_nobody_waiting():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="collective")
        if rank == 0:
            trainer.skip_step()
        else:
            weight.grad = torch.full((3,), 4.0)
            trainer.step()
        return weight.tolist()

    assert returned(run_ranks(2, program)) == [[-2.0] * 3] * 2


def test_gradients_can_be_clipped_between_their_sum_and_the_update():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(4))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="collective")
        weight.grad = torch.full((4,), 3.0 * rank)
        trainer.allreduce_grads(average=True)
        norm = float(torch.nn.utils.clip_grad_norm_([weight], 1.0))
        trainer.update()
        return norm, weight.tolist()

    for norm, weight in returned(run_ranks(3, program)):
        assert norm == 6
        assert weight == pytest.approx([-0.5] * 4)


def test_a_sparse_gradient_is_summed_as_an_array():
    def program(rank):
        table = torch.nn.Embedding(6, 2, sparse=True)
        trainer = Trainer(table.parameters(), "sgd", {"learning_rate": 1.0}, kvstore="collective")
        trainer.broadcast_parameters()
        before = table.weight.detach().clone()
        table(torch.tensor([rank, 5])).sum().backward()
        trainer.step()
        return (before - table.weight.detach())[:, 0].tolist()

    assert returned(run_ranks(2, program)) == [pytest.approx([0.5, 0.5, 0, 0, 0, 1])] * 2


def test_two_devices_on_each_worker_are_one_sum():
    def program(rank):
        replicas = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        trainer = Trainer([replicas], "sgd", {"learning_rate": 1.0}, kvstore="collective", overlap=rank >= 0)
        for _ in range(2):
            for device, replica in enumerate(replicas):
                replica.grad = None
                (replica * (rank + device)).sum().backward()
            trainer.step()
        return [replica.tolist() for replica in replicas]

    # Gradients 0 and 1 on one worker, 1 and 2 on the other: the mean over devices and workers is 1.
    assert returned(run_ranks(2, program)) == [[[-2.0] * 3] * 2] * 2


def test_its_states_and_checkpoints_are_those_of_the_workers(tmp_path):
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3))
        trainer = Trainer([weight], "adam", {"learning_rate": 0.5}, kvstore="collective")

        def step():
            weight.grad = torch.full((3,), rank + 1.0)
            trainer.step()
            return weight.tolist()

        step()
        trainer.save_checkpoint(tmp_path / "all", 1, state=rank).result()
        trainer.save_states(tmp_path / "states")
        then = step()
        found = trainer.load_checkpoint(tmp_path / "all")
        return then == step(), found.state, updates_in(tmp_path / "states")

    assert returned(run_ranks(2, program)) == [(True, 0, 1), (True, 1, 1)]


def test_workers_that_train_different_networks_are_told_before_the_first_step():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3 + rank))
        trainer = Trainer([weight], "sgd", kvstore="collective")
        weight.grad = torch.ones_like(weight)
        told = r"worker-0: parameter 0 of shape .*: float32 of shape \(3,\); worker-1: parameter 0 of .*: .*\(4,\)"
        with pytest.raises(InitMismatch, match=told):
            trainer.step()
        other = Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd" if rank else "adam", kvstore="collective")
        with pytest.raises(InitMismatch, match="adam"):
            other.broadcast_parameters()

    returned(run_ranks(2, program))


def test_to_update_on_the_store_and_to_share_it_are_refused():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match="'collective' cannot update weights.*each worker updates"):
            Trainer([weight], "sgd", kvstore="collective", update_on_kvstore=True).broadcast_parameters()
        with kv.create("collective") as store:
            Trainer([weight], "sgd", kvstore=store).broadcast_parameters()
            with pytest.raises(ValueError, match="another Trainer uses it"):
                Trainer([weight], "sgd", kvstore=store).broadcast_parameters()

    returned(run_ranks(2, program))


def test_halves_compress_the_gradients():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3))
        options = {"compression_params": {"type": "fp16"}, "kvstore": "collective"}
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, **options)
        weight.grad = torch.full((3,), 1 + 2**-14)
        trainer.step()
        return weight.tolist()

    assert returned(run_ranks(2, program)) == [[-1.0] * 3] * 2


def test_a_skipped_step_goes_along_with_the_others_who_give_their_batch_sizes():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="collective")
        if rank == 0:
            trainer.skip_step()
        else:
            weight.grad = torch.full((3,), 8.0)
            trainer.step(4)
        return weight.tolist()

    assert returned(run_ranks(3, program)) == [[-4.0] * 3] * 3


def test_workers_that_average_and_others_that_give_batch_sizes_all_get_an_error():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(3))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="collective")
        weight.grad = torch.ones(3)
        with pytest.raises(ValueError, match=r"some workers called step\(\).*others step\(batch_size\)"):
            trainer.step(4) if rank else trainer.step()
        weight.grad = torch.ones(3)
        trainer.step()
        return weight.tolist()

    assert returned(run_ranks(2, program)) == [[-1.0] * 3] * 2
