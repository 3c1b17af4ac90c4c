"""`kvdist.horovod`: Horovod's names, and its trainer for Gluon's convention."""

from __future__ import annotations

import pytest
import torch

import kvdist
import kvdist.collective
import kvdist.horovod as hvd
from kvdist import CollectiveError, Trainer, kv
from kvdist.config.environment import horovod_without_effect
from kvdist.optimizer import create
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


def test_it_hands_on_every_name_of_the_collectives():
    for name in kvdist.collective.__all__:
        if name not in ("init", "shutdown"):
            assert getattr(hvd, name) is getattr(kvdist.collective, name), name
    assert set(kvdist.collective.__all__) <= set(hvd.__all__) == {name for name in hvd.__all__ if hasattr(hvd, name)}


def test_a_process_begins_and_ends_being_a_rank_and_may_begin_again():
    for _ in range(2):
        hvd.init()
        hvd.init()
        try:
            assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
            assert hvd.is_homogeneous()
            assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        finally:
            hvd.shutdown()
        assert not hvd.is_initialized()


def test_a_program_that_begins_after_a_store_stays_a_rank_when_that_is_closed():
    store = kv.create("collective")
    hvd.init()
    try:
        store.close()
        assert hvd.is_initialized() and hvd.rank() == 0
    finally:
        hvd.shutdown()


def test_a_question_before_init_is_answered_in_the_words_of_horovod():
    with pytest.raises(ValueError, match=r"^kvdist.horovod .*has not been initialized; use hvd.init\(\)$"):
        hvd.rank()


def test_communicators_are_refused_with_what_to_use():
    with pytest.raises(ValueError, match="give some of the ranks as process_sets"):
        hvd.init(comm=[0, 1])


def test_variables_of_autotuning_and_hierarchical_operations_are_told():
    names = ("HOROVOD_AUTOTUNE", "HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER")
    told = horovod_without_effect(dict.fromkeys(names, "1"))
    assert sorted(sentence.split(" has no effect: ")[0] for sentence in told) == sorted(names)


def test_what_was_built_in_is_told_as_it_is():
    no = (hvd.mpi_threads_supported, hvd.mpi_enabled, hvd.mpi_built, hvd.ddl_built, hvd.ccl_built, hvd.sycl_built)
    assert not any(ask() for ask in no)
    assert hvd.gloo_enabled() and hvd.gloo_built()
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert (hvd.nccl_built() > 0) == hvd.cuda_built()


def test_an_error_of_an_operation_is_horovods():
    assert hvd.HorovodInternalError is CollectiveError


def trained(rank, make, steps=3, size=lambda rank: 2 + rank):
    """Weights after some steps with losses that are sums over different numbers of examples."""
    weight = torch.nn.Parameter(torch.full((5,), float(rank)))  # rank 0's become everybody's
    trainer = make([weight])
    for step in range(steps):
        weight.grad = torch.full((5,), float((rank + 1) * size(rank) * (step + 1)))
        trainer.step(size(rank))
    trainer.close()
    return weight.tolist()


def test_gradients_are_averaged_and_each_rank_divides_by_its_own_examples():
    def program(rank):
        return trained(rank, lambda params: hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.5}))

    # The mean of 1 and 2, times 1, 2 and 3.
    assert returned(run_ranks(2, program)) == [[-0.5 * 1.5 * 6] * 5] * 2


@each(
    "options",
    [
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "num_groups": 3, "prefix": "net_"},
    ],
)
def test_numbers_that_halves_hold_come_out_the_same_whatever_way_they_travel(options):
    def program(rank):
        def make(params):
            return hvd.DistributedTrainer(params, create("sgd", learning_rate=0.5), **options)

        return trained(rank, make)

    assert returned(run_ranks(2, program)) == [[-0.5 * 1.5 * 6] * 5] * 2


def test_a_mean_needs_no_size_and_a_skipped_step_keeps_the_ranks_together():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(2))
        trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0})
        weight.grad = torch.full((2,), rank + 1.0)
        trainer.step()
        weight.grad = torch.full((2,), 4.0)
        if rank:
            trainer.skip_step()
        else:
            trainer.step()
        weight.grad = torch.full((2,), 8.0 * rank)
        trainer.allreduce_grads()
        assert weight.grad.tolist() == [4.0] * 2
        trainer.update(4)
        return weight.tolist()

    assert returned(run_ranks(2, program)) == [[-1.5 - 2 - 1] * 2] * 2


def test_a_process_set_trains_by_itself():
    def program(rank):
        others = hvd.add_process_set([1, 2])

        def make(params):
            return hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}, process_set=others)

        weights = trained(rank, make, steps=1) if rank else None
        hvd.barrier()  # a rank that ends ends the others' operations
        return weights

    # Rank 1's weights, and the mean of 2 and 3.
    assert returned(run_ranks(3, program)) == [None, [1 - 2.5] * 5, [1 - 2.5] * 5]


def test_it_is_a_trainer_with_the_weights_of_one():
    def program(rank):
        def plain(params):
            return Trainer(params, "adam", {"learning_rate": 0.1}, kvstore="collective")

        def distributed(params):
            return hvd.DistributedTrainer(params, "adam", {"learning_rate": 0.1})

        # The plain one sums what each divides, so it gives each rank's share of twice as many examples.
        return trained(rank, plain, size=lambda _: 4), trained(rank, distributed, size=lambda _: 4)

    for summed, averaged in returned(run_ranks(2, program)):
        assert summed == pytest.approx(averaged, abs=1e-5), "adam does not see a constant factor"


def test_lazy_parameters_get_their_weights_after_their_first_forward_pass():
    def program(rank):
        net = torch.nn.LazyLinear(3)
        trainer = hvd.DistributedTrainer(net.parameters(), "sgd", {"learning_rate": 0.0})
        with pytest.raises(RuntimeError, match="run one forward pass on every worker before"):
            trainer.step(1)
        net(torch.ones(2, 4)).sum().backward()
        trainer.step(2)
        return net.weight.detach().clone()

    first, second = returned(run_ranks(2, program))
    assert torch.equal(first, second)


def test_what_is_no_optimizer_or_number_of_it_is_refused():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(2))
        mistaken = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1))
        with pytest.raises(TypeError, match=r"SGD is torch's: give a name.*'adam'.*keep it, in DistributedOptimizer"):
            hvd.DistributedTrainer([weight], mistaken)
        with pytest.raises(ValueError, match="gradient_predivide_factor is 0"):
            hvd.DistributedTrainer([weight], "sgd", gradient_predivide_factor=0)
        with pytest.raises(ValueError, match="num_groups is -1"):
            hvd.DistributedTrainer([weight], "sgd", num_groups=-1)
        with pytest.raises(TypeError, match=r"compression is Compression.none, .fp16 or .bf16"):
            hvd.DistributedTrainer([weight], "sgd", compression="fp16")
        with pytest.raises(ValueError, match="is not registered"):
            hvd.DistributedTrainer([weight], "sgd", process_set=hvd.ProcessSet(0))

    returned(run_ranks(1, program))


def test_a_rank_whose_losses_are_means_trains_beside_one_whose_losses_are_sums():
    def program(rank):
        weight = torch.nn.Parameter(torch.zeros(2))
        trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0})
        weight.grad = torch.full((2,), 4.0)
        trainer.step(4) if rank else trainer.step()
        return weight.tolist()

    assert returned(run_ranks(2, program)) == [[-2.5, -2.5]] * 2


def test_elastic_training_is_refused_with_what_to_do_instead():
    for use in (lambda: hvd.elastic.run, lambda: hvd.elastic.TorchState(epoch=0)):
        with pytest.raises(
            NotImplementedError, match=r"kvdist\.horovod\.elastic is not .*restart:N.*--on-loss continue"
        ):
            use()
    with pytest.raises(NotImplementedError, match="ElasticSampler"):
        from kvdist.horovod import elastic  # noqa: F401
    with pytest.raises(AttributeError, match=r"module 'kvdist\.horovod' has no attribute 'elastics'"):
        _ = hvd.elastics
