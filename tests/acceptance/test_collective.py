"""Training without servers: every operation by its numbers, what ranks must agree on, and the ways in."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import kvdist
import kvdist.horovod as hvd
from kvdist import Trainer, kv
from tests.acceptance.together import ROOT, Together, same
from tests.ports import free_port

pair = Together(2, 0)
three = Together(3, 0)
REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# Operations.


@three
def test_a_rank_knows_who_it_is():
    assert (hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.cross_rank()) == (3, 3, 1, 0)
    assert hvd.rank() == hvd.local_rank() == int(os.environ["KVDIST_RANK"])
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert hvd.gloo_built() and not hvd.mpi_built() and not hvd.mpi_enabled() and not hvd.mpi_threads_supported()
    hvd.init()  # a second call does nothing
    assert hvd.size() == 3


@three
def test_allreduce_averages_unless_it_is_told_otherwise_and_leaves_its_input():
    rank = hvd.rank()
    for dtype in (*REALS, *WHOLES):
        mine = torch.tensor([[1, 2], [3, 3 * rank]]).to(dtype)
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert total.dtype == dtype and mine[1, 1] == 3 * rank
        same(total, [[3, 6], [9, 9]])
        same(hvd.allreduce(mine), [[1, 2], [3, 3]])
        same(hvd.allreduce(mine, op=hvd.Average), [[1, 2], [3, 3]])
    same(hvd.allreduce(torch.tensor([1.0 + rank]), average=False), [6])


@three
def test_min_max_and_product_are_over_the_ranks():
    rank = hvd.rank()
    for dtype in (*REALS, *WHOLES):
        mine = torch.tensor([rank + 1, 3 - rank, 2]).to(dtype)
        for op, wanted in ((hvd.Min, [1, 1, 2]), (hvd.Max, [3, 3, 2]), (hvd.Product, [6, 6, 8])):
            same(hvd.allreduce(mine, op=op), wanted)


@three
def test_factors_and_compression_and_in_place_and_handles():
    rank = hvd.rank()
    mine = torch.tensor([1.0, 3.0])
    same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), [6, 18])
    same(hvd.allreduce(mine / 3, op=hvd.Sum, compression=hvd.Compression.fp16), (mine / 3).half().double() * 3, 1e-3)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    same(mine, [3, 9])
    handle = hvd.allreduce_async(torch.tensor([float(rank)]), name="later", op=hvd.Sum)
    same(hvd.synchronize(handle), [3])
    assert hvd.poll(handle)


@three
def test_a_group_may_mix_types_and_shapes_and_is_one_operation():
    rank = hvd.rank()
    group = [torch.full((3,), rank + 1.0), torch.tensor(rank), torch.ones((0, 4)), torch.ones((200, 300)).half()]
    found = hvd.grouped_allreduce(group, op=hvd.Sum)
    for got, given, wanted in zip(found, group, (6, 3, 0, 3), strict=True):
        assert got.dtype == given.dtype and got.shape == given.shape and bool((got == wanted).all())
    assert hvd.grouped_allreduce_(group[:1], op=hvd.Sum)[0] is group[0]
    same(group[0], [6, 6, 6])


@pair
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    rank = hvd.rank()
    own = torch.zeros(2)
    own[rank] = 3.0
    same(hvd.allreduce(own, op=hvd.Adasum), [3, 3], 1e-6)
    same(hvd.allreduce(torch.full((4,), 1.0 + 2 * rank), op=hvd.Adasum), [2, 2, 2, 2], 1e-6)
    a, b = torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([0.5, -1.0, 3.0]).double()
    wanted = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
    same(hvd.allreduce((a, b)[rank], op=hvd.Adasum), wanted, 1e-12)


@three
def test_adasum_of_three_ranks_is_refused_and_all_go_on():
    with pytest.raises(Exception, match="power of two|powers of two"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum), [3, 3])


@three
def test_rows_are_gathered_in_the_order_of_ranks_however_many_each_has():
    rank = hvd.rank()
    same(hvd.allgather(torch.full((rank + 1, 2), rank)), [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]])
    same(hvd.allgather(torch.full((2 * (rank == 1),), 7.0)), [7, 7])  # some have none
    first, second = hvd.grouped_allgather([torch.tensor([rank]), torch.full((rank,), 5.0)])
    same(first, [0, 1, 2]), same(second, [5, 5, 5])


@three
def test_a_broadcast_gives_all_the_tensor_of_the_root():
    rank = hvd.rank()
    for root in range(3):
        mine = torch.full((2, 2), rank + 1.0)
        same(hvd.broadcast(mine, root_rank=root), torch.full((2, 2), root + 1.0))
        same(mine, torch.full((2, 2), rank + 1.0))
        assert hvd.broadcast_(mine, root_rank=root) is mine
        same(mine, torch.full((2, 2), root + 1.0))


@three
def test_alltoall_sends_each_rank_its_rows():
    rank = hvd.rank()
    same(hvd.alltoall(torch.arange(6) + 10 * rank), [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank,
                                                     20 + 2 * rank, 21 + 2 * rank])  # fmt: skip
    splits = torch.tensor([0, 1, 2], dtype=torch.int32)
    rows, counts = hvd.alltoall(torch.tensor([10.0, 20.0, 21.0]) + 100 * rank, splits=splits)
    assert counts.dtype == torch.int32 and counts.tolist() == [rank] * 3
    same(rows, ([], [10, 110, 210], [20, 21, 120, 121, 220, 221])[rank])


@three
def test_reducescatter_gives_each_rank_its_rows_of_the_result():
    rank = hvd.rank()
    mine = torch.arange(14.0).reshape(7, 2) * (rank + 1)
    rows = ((0, 3), (3, 5), (5, 7))[rank]
    same(hvd.reducescatter(mine, op=hvd.Sum), torch.arange(14.0).reshape(7, 2)[slice(*rows)] * 6)
    same(hvd.reducescatter(mine), torch.arange(14.0).reshape(7, 2)[slice(*rows)] * 2)
    (only,) = hvd.grouped_reducescatter([torch.ones(3) * rank], op=hvd.Sum)
    same(only, [3])


@three
def test_gradients_pass_through_the_operations():
    rank = hvd.rank()
    for operation, wanted in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum), 6.0),
        (lambda x: hvd.allreduce(x), 2.0),
        (lambda x: hvd.broadcast(x, root_rank=1), 2.0 if rank == 1 else 0.0),
    ):
        mine = torch.ones(2, requires_grad=True)
        (operation(mine) * (rank + 1)).sum().backward()
        same(mine.grad, [wanted] * 2)


@three
def test_sparse_tensors_are_summed():
    rank = hvd.rank()
    mine = torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], (3,))
    same(hvd.allreduce(mine, op=hvd.Sum).to_dense(), [3 + 2, 2, 2])


@three
def test_objects_travel_without_pickle_and_what_cannot_is_refused_by_name():
    rank = hvd.rank()
    thing = {"rank": rank, "list": [1, 2.5, None, "ö"], "tensor": torch.tensor([rank, 7])}
    found = hvd.broadcast_object(thing, root_rank=2)
    assert found["rank"] == 2 and found["list"] == [1, 2.5, None, "ö"] and found["tensor"].tolist() == [2, 7]
    assert hvd.allgather_object({"r": rank}) == [{"r": 0}, {"r": 1}, {"r": 2}]

    class Own:
        pass

    with pytest.raises((TypeError, kvdist.CollectiveError), match="Own"):
        hvd.broadcast_object(Own(), root_rank=0)
    with pytest.raises((TypeError, kvdist.CollectiveError), match="Own"):
        hvd.allgather_object(Own())
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [3])
    assert hvd.metric_average(float(rank), "loss") == 1.0


# What ranks must agree on.


@three
def test_ranks_that_call_different_operations_all_get_the_same_error_that_names_them_and_go_on():
    rank, texts = hvd.rank(), []
    different = (
        lambda: hvd.allreduce(torch.ones(2 + (rank == 1)), name="grads"),
        lambda: hvd.allreduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank == 2])),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if rank else hvd.Average),
        lambda: hvd.allreduce(torch.ones(2), name=f"of {rank}"),
        lambda: hvd.broadcast(torch.ones(2), root_rank=rank),
        lambda: hvd.allgather(torch.ones(2)) if rank else hvd.allreduce(torch.ones(2)),
        lambda: hvd.grouped_allreduce([torch.ones(2)] * (1 + rank)),
    )
    for call in different:
        with pytest.raises(kvdist.CollectiveMismatch) as caught:
            call()
        texts.append(str(caught.value))
        same(hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum), [3, 3])
    assert "rank 1 allreduce 'grads' of float32[3] (Average)" in texts[0]
    assert "allreduce 'grads' of float32[2] (Average)" in texts[0]
    assert hvd.allgather_object(texts) == [texts] * 3
    assert issubclass(kvdist.CollectiveMismatch, hvd.HorovodInternalError)


@three
def test_a_mistake_of_one_rank_is_an_error_on_all():
    with pytest.raises((ValueError, kvdist.CollectiveError)):
        hvd.broadcast(torch.ones(2), root_rank=7 if hvd.rank() == 1 else 0)
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [3])


# Process sets and join.


@three
def test_process_sets_are_called_by_their_ranks_alone():
    rank = hvd.rank()
    ends, alone = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1]))
    assert ends.included() is (rank != 1) and ends.size() == 2
    if rank != 1:
        assert ends.rank() == rank // 2
        same(hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum, process_set=ends), [4])
        same(hvd.broadcast(torch.tensor([rank]), root_rank=2, process_set=ends), [2])  # a rank among all
        same(hvd.allgather(torch.tensor([rank]), process_set=ends), [0, 2])
    else:
        same(hvd.allreduce(torch.tensor([5.0]), op=hvd.Sum, process_set=alone), [5])
        with pytest.raises(Exception, match="process set|rank 1"):
            hvd.allreduce(torch.tensor([5.0]), process_set=ends)
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.global_process_set), [3])
    assert hvd.remove_process_set(ends) and hvd.remove_process_set(alone)
    assert not hvd.remove_process_set(hvd.global_process_set)
    for wrong in ([1, 1], [], [0, 7]):
        with pytest.raises(ValueError):
            hvd.add_process_set(wrong)


@three
def test_ranks_that_have_joined_take_part_with_zeros_and_learn_who_came_last():
    rank = hvd.rank()
    for step in range(rank):  # rank 2 has two batches, rank 1 one, rank 0 none
        found = hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum, name=f"step {step}")
        same(found, [(6, 3)[step]] * 2)
        same(hvd.allreduce(torch.full((2,), 3.0), name=f"mean {step}"), [(2, 1)[step]] * 2)
    assert hvd.join() == 2
    if rank:
        with pytest.raises(kvdist.CollectiveMismatch, match="join"):
            hvd.allreduce(torch.ones(1), op=hvd.Min)
    assert hvd.join() in (0, 1, 2)
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [3])


# Training.


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def network(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))


def loss_of(net, rank):
    inputs, targets = batch_of(rank)
    return (net(inputs) - targets).square().mean()


def alone(make, ranks, scale=1.0, steps=5):
    """One process with the batches of all ranks."""
    net = network()
    rule = make(net.parameters())
    for _ in range(steps):
        rule.zero_grad()
        (sum(loss_of(net, rank) for rank in range(ranks)) / ranks * scale).backward()
        rule.step()
    return list(net.parameters())


def alike(net, wanted, within=1e-6):
    for got, want in zip(net.parameters(), wanted, strict=True):
        same(got, want.detach(), within)


@three
def test_a_distributed_optimizer_makes_the_steps_of_one_process_with_all_batches():
    def sgd(weights):
        return torch.optim.SGD(weights, 0.1, momentum=0.9)

    def adam(weights):
        return torch.optim.Adam(weights, 0.05)

    for make, options, scale in (
        (sgd, {}, 1.0),
        (adam, {}, 1.0),
        (sgd, {"op": hvd.Sum}, 3.0),
        (sgd, {"gradient_predivide_factor": 4.0}, 1.0),
        (sgd, {"groups": 2}, 1.0),
    ):
        net = network(seed=1 + hvd.rank())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        rule = hvd.DistributedOptimizer(make(net.parameters()), named_parameters=net.named_parameters(), **options)
        assert isinstance(rule, torch.optim.Optimizer)
        for _ in range(5):
            rule.zero_grad()
            loss_of(net, hvd.rank()).backward()
            rule.step()
        alike(net, alone(make, 3, scale))


@three
def test_several_passes_make_one_step_and_gradients_may_be_clipped_between():
    net, mirror = network(), network()
    rule = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), backward_passes_per_step=2)
    own = torch.optim.SGD(mirror.parameters(), 0.1)
    for _ in range(3):
        rule.zero_grad(), own.zero_grad()
        for _ in range(2):
            loss_of(net, hvd.rank()).backward()
        rule.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        with rule.skip_synchronize():
            rule.step()
        (2 * sum(loss_of(mirror, rank) for rank in range(3)) / 3).backward()
        same(norm, torch.nn.utils.clip_grad_norm_(mirror.parameters(), 0.5), 1e-5)
        own.step()
    alike(net, mirror.parameters())


@three
def test_the_state_of_an_optimizer_becomes_that_of_the_root_without_a_step():
    net = network()
    rule = torch.optim.Adam(net.parameters(), lr=0.1 * (1 + hvd.rank()))
    before = [weight.detach().clone() for weight in net.parameters()]
    if hvd.rank() == 1:
        loss_of(net, 0).backward()
        rule.step()
        before = [weight.detach().clone() for weight in net.parameters()]
    hvd.broadcast_optimizer_state(rule, root_rank=1)
    alike(net, before, 0)
    state = rule.state_dict()
    assert state["param_groups"][0]["lr"] == 0.2 and int(state["state"][0]["step"]) == 1
    plain = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + hvd.rank()))
    hvd.broadcast_optimizer_state(plain, root_rank=2)  # without state
    assert plain.param_groups[0]["lr"] == pytest.approx(0.3)


@three
def test_trainers_on_a_collective_store_make_the_steps_of_one_process():
    wanted = alone(lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9), 3)
    for name, overlap in (("collective", False), ("collective", True), ("horovod", False)):
        net = network(seed=1 + hvd.rank())
        numbers = {"learning_rate": 0.1, "momentum": 0.9}
        trainer = Trainer(net.parameters(), "sgd", numbers, kvstore=name, overlap=overlap)
        trainer.broadcast_parameters()
        for _ in range(5):
            net.zero_grad()
            loss_of(net, hvd.rank()).backward()
            trainer.step()
        alike(net, wanted)
        trainer.close()


@three
def test_gluons_trainer_averages_and_each_rank_divides_by_its_own_examples():
    net = network(seed=1 + hvd.rank())
    trainer = hvd.DistributedTrainer(net.parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for _ in range(5):
        net.zero_grad()
        (8 * loss_of(net, hvd.rank())).backward()
        trainer.step(8)
    alike(net, alone(lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9), 3))


@three
def test_the_two_conventions_of_a_step_do_not_mix_on_a_collective_store():
    weight = torch.nn.Parameter(torch.zeros(2))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="collective")
    weight.sum().backward()
    with pytest.raises((ValueError, kvdist.CollectiveError)):
        trainer.step() if hvd.rank() else trainer.step(4)
    trainer.close()


@three
def test_a_collective_store_sums_over_devices_and_workers_and_knows_no_tables():
    with kv.create("collective") as store:
        assert (store.rank, store.num_workers, store.num_servers) == (hvd.rank(), 3, 0)
        store.broadcast(["a", "b"], [torch.full((2,), store.rank + 5.0)] * 2, [torch.zeros(2), torch.zeros(2)])
        same(store.pull("a"), [5, 5])
        devices = [torch.full((2,), float(store.rank)), torch.ones(2)]
        store.pushpull(["a", "b"], [devices, [torch.ones(2)]])
        same(devices[0], [6, 6]), same(devices[1], [6, 6]), same(store.pull("b"), [3, 3])
        assert not store.is_capable("optimizer") and store.average(store.rank) == 1
        with pytest.raises(Exception, match="optimizer|update"):
            store.set_optimizer("sgd")
        with pytest.raises(Exception, match="hybrid|rows|table"):
            store.init("t", kvdist.RowSparse.zeros((3, 2)))
        store.barrier()


@three
def test_nccl_sums_among_the_workers_where_a_launcher_has_started_several():
    with kv.create("nccl") as store:
        assert (store.type, store.num_workers, store.num_servers) == ("nccl", 3, 0)
        store.init("w", torch.zeros(2))
        store.pushpull("w", value := torch.full((2,), float(store.rank)))
        same(value, [3, 3])


@three
def test_servers_are_an_error_that_says_so():
    with pytest.raises(kvdist.ConfigError, match="-s|server"):
        kv.create("dist")


@three
def test_synchronized_batch_normalisation_is_that_of_all_batches_in_one():
    rank = hvd.rank()
    whole = torch.arange(24.0).reshape(12, 2).square()
    own, mirror = hvd.SyncBatchNorm(2), torch.nn.BatchNorm1d(2)
    same(own(whole[4 * rank : 4 * rank + 4]), mirror(whole)[4 * rank : 4 * rank + 4].detach(), 1e-5)
    same(own.running_mean, mirror.running_mean, 1e-4)


@three
def test_the_timeline_is_a_file_that_viewers_open():
    path = Path(tempfile.gettempdir()) / "timeline.json"
    hvd.start_timeline(str(path))
    hvd.allreduce(torch.ones(2), name="traced")
    hvd.stop_timeline()
    hvd.barrier()
    if hvd.rank() == 0:
        for file in path.parent.glob("timeline*.json"):
            assert "traced" in json.dumps(json.loads(file.read_text()))
            file.unlink()


@three
def test_torch_distributed_stays_the_programs_own():
    assert not torch.distributed.is_initialized()


@three
def test_ranks_may_end_and_begin_again():
    rank = hvd.rank()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(Exception, match="init"):
        hvd.allreduce(torch.ones(1))
    for bad in ([[0], [0, 7]], [[0, 7]] if rank else [[0]]):
        with pytest.raises(ValueError, match="distinct ranks"):
            hvd.init(process_sets=bad)
        assert not hvd.is_initialized()
    hvd.init(process_sets=[[0, 1]])
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [3])


# Ways in.

SUMS = """
    import torch
    import kvdist.collective as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    print(f"rank {hvd.rank()} of {hvd.size()}: {total.tolist()}", flush=True)
"""
WAYS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovod": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE"),
}
SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "torchrun"]


@pytest.mark.parametrize("way", ["torchrun", *SLOW_WAYS])
def test_the_same_program_runs_under_the_variables_of_other_launchers(job, script, way):
    path, port = script(SUMS, "sums.py"), free_port()
    for rank in range(2):
        own = {name: str(2 if "SIZE" in name else rank) for name in WAYS[way]}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        job.start(f"rank-{rank}", [sys.executable, path], **own)
    job.succeed()
    assert [job.processes[f"rank-{rank}"].lines_with("rank ") for rank in range(2)] == [
        ["rank 0 of 2: [3.0]"], ["rank 1 of 2: [3.0]"]
    ]  # fmt: skip


def test_a_process_that_nobody_started_is_one_rank_of_one(job, script):
    process = job.start("alone", [sys.executable, script(SUMS, "sums.py")], PYTHONPATH=str(ROOT))
    job.succeed()
    assert process.lines_with("rank ") == ["rank 0 of 1: [1.0]"]


@pytest.mark.parametrize(("half", "named"), [("RANK", "WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")])
def test_half_of_what_a_launcher_sets_is_an_error_that_names_the_other_half(monkeypatch, half, named):
    monkeypatch.setenv(half, "0")
    with pytest.raises(kvdist.ConfigError, match=named):
        hvd.init()


def test_a_job_that_encrypts_has_no_collectives(job, script):
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "KVDIST_SECURITY": "curve"}
    process = job.start("secret", [sys.executable, script(SUMS, "sums.py")], PYTHONPATH=str(ROOT), **own)
    assert job.finish()["secret"] != 0
    assert process.lines_with("ConfigError: KVDIST_SECURITY")


FALLS = """
    import os, signal, sys
    import torch
    import kvdist.collective as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1), name="first")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.allreduce(torch.ones(1), name="second")
    except __import__("kvdist").RankLostError as error:
        print("lost:", error, flush=True)
        raise
"""


def test_a_rank_that_is_killed_is_named_to_all_others_with_the_operation_that_waited(job, script):
    options = [sys.executable, "-m", "kvdist_launch.run_cli", "-np", "2", "--", sys.executable, script(FALLS)]
    launcher = job.start("launcher", options, PYTHONPATH=str(ROOT))
    assert job.finish() == {"launcher": 137}
    (line,) = launcher.lines_with("lost:")
    assert "rank 1" in line and "second" in line


LATE = """
    import time
    import torch
    import kvdist.collective as hvd

    hvd.init()
    if hvd.rank() == 1:
        time.sleep(60)
    try:
        hvd.allreduce(torch.ones(1), name="gradients")
    except __import__("kvdist").CollectiveError as error:
        print("ended:", error, flush=True)
        raise
"""


def test_a_wait_is_told_with_the_ranks_that_are_missing_and_ends_the_job_if_it_may_not_last(job, script):
    own = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    options = [sys.executable, "-m", "kvdist_launch.run_cli", "-np", "2", "--", sys.executable, script(LATE)]
    launcher = job.start("launcher", options, PYTHONPATH=str(ROOT), **own)
    assert job.finish()["launcher"] not in (0, None)
    (line,) = launcher.lines_with("ended:")
    assert "gradients" in line and "rank 1" in line
    assert [line for line in launcher.lines_with("gradients") if "w0" in line and "ended:" not in line]


KERAS = """
    import numpy as np
    import kvdist.keras as hvd
    import keras

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    begun = net.get_weights()[0]
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = [np.eye(4, dtype="float32"), -2 * np.ones((4, 4), "float32")]
    y = [np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")]
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    told = net.fit(x[hvd.rank()], y[hvd.rank()], batch_size=4, epochs=3, callbacks=callbacks, verbose=0)
    first = hvd.allgather_object(begun.tolist())[0]
    w = np.array(first)
    for _ in range(3):
        w = w - 0.1 * sum(2 / 4 * a.T @ (a @ w - b) for a, b in zip(x, y)) / 2
    np.testing.assert_allclose(net.get_weights()[0], w, atol=1e-5)
    losses = hvd.allgather_object([float(loss) for loss in told.history["loss"]])
    assert losses[0] == losses[1], losses
    print("as one process", flush=True)
"""


@pytest.mark.slow
def test_keras_trains_by_fit_as_one_process_with_all_batches(job, script):
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    options = [sys.executable, "-m", "kvdist_launch.run_cli", "-np", "2", "--", sys.executable, script(KERAS)]
    launcher = job.start("launcher", options, PYTHONPATH=str(ROOT), KERAS_BACKEND="torch")
    job.finish()
    for left in job.folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert len(launcher.lines_with("as one process")) == 2, job.transcript()
