"""A trainer is saved and goes on from there, whoever updates its weights."""

from __future__ import annotations

import pytest
import torch

from kvdist import CheckpointError, LazyRows, RowSparse, Trainer, kv
from kvdist.lr_scheduler import FactorScheduler

RULES = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.05}),
    ("lamb", {"learning_rate": 0.05}),
    ("groupadagrad", {"learning_rate": 0.05}),
]
PLACES = {
    "without a store": {"kvstore": None},
    "on a device store": {"kvstore": "device", "update_on_kvstore": True},
    "here, with a cluster": {"kvstore": "dist", "update_on_kvstore": False},
    "on a cluster": {"kvstore": "dist", "update_on_kvstore": True},
}


def made(rule="sgd", numbers=None, seed=0, devices=1, **where):
    torch.manual_seed(seed)
    shapes = [(5, 3), (7, 2)]
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    replicas = [[torch.nn.Parameter(weight.detach().clone()) for _ in range(devices)] for weight in weights]
    named = [(f"layer{i}.weight", one[0] if devices == 1 else one) for i, one in enumerate(replicas)]
    return Trainer(named, rule, numbers or {"learning_rate": 0.1, "momentum": 0.9}, **where), replicas


def train(trainer, replicas, begin, end):
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        for one in replicas:
            for replica in one:
                replica.grad = torch.randn(replica.shape, generator=generator)
        trainer.step()


def weights_of(replicas):
    return [replica.detach().clone() for one in replicas for replica in one]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def where(request):
    return request.param


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rule", "numbers"), RULES, ids=[rule for rule, _ in RULES])
def test_a_checkpoint_brings_back_weights_and_states_to_the_bit(tmp_path, where, rule, numbers):
    trainer, replicas = made(rule, numbers, **where)
    train(trainer, replicas, 0, 3)
    saved = weights_of(replicas)
    future = trainer.save_checkpoint(tmp_path, 3, state={"step": 3})
    train(trainer, replicas, 3, 6)
    assert future.result() == tmp_path / "step-3"
    expected = weights_of(replicas)
    trainer.close()

    trainer, replicas = made(rule, numbers, seed=1, **where)
    train(trainer, replicas, 20, 22)  # whatever it was before is gone
    checkpoint = trainer.load_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.state) == (3, {"step": 3})
    assert same(weights_of(replicas), saved)
    train(trainer, replicas, 3, 6)
    assert same(weights_of(replicas), expected)
    trainer.close()


def test_what_one_kind_of_trainer_has_saved_another_can_load(tmp_path):
    trainer, replicas = made(**PLACES["without a store"])
    train(trainer, replicas, 0, 3)
    trainer.save_checkpoint(tmp_path, 3).result()
    train(trainer, replicas, 3, 5)
    expected = weights_of(replicas)
    other, replicas = made(seed=1, **PLACES["on a cluster"])
    other.load_checkpoint(tmp_path)
    train(other, replicas, 3, 5)
    assert same(weights_of(replicas), expected)
    other.close()


def test_states_alone_leave_the_weights_as_they_are(tmp_path, where):
    trainer, replicas = made(**where)
    train(trainer, replicas, 0, 3)
    trainer.save_states(tmp_path / "states")
    begun = weights_of(replicas)
    train(trainer, replicas, 3, 5)
    expected = weights_of(replicas)
    trainer.load_states(tmp_path / "states")
    assert same(weights_of(replicas), expected), "the weights stay"
    with torch.no_grad():
        for one, weight in zip(replicas, begun, strict=True):
            one[0].copy_(weight)
    trainer.broadcast_parameters()
    train(trainer, replicas, 3, 5)
    assert same(weights_of(replicas), expected), "the momenta are those of the third step"
    trainer.close()


def test_states_alone_in_another_order_are_refused_and_those_without_names_taken(tmp_path, where):
    def trained(names, grads=(0.0, 0.0)):
        parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in names}
        trainer = Trainer(parameters.items(), "sgd", {"learning_rate": 1.0, "momentum": 0.5}, **where)
        for parameter, grad in zip(parameters.values(), grads, strict=True):
            parameter.grad = torch.full((2,), grad)
        trainer.step()
        return trainer

    def momenta(trainer):
        states = trainer.as_torch_optimizer().state_dict()["state"]
        return [abs(states[place]["momentum_buffer"][0].item()) for place in (0, 1)]

    trainer = trained("ab", [1.0, 8.0])
    trainer.save_states(tmp_path / "states")
    trainer.close()
    trainer = trained("ba")
    with pytest.raises(CheckpointError, match="another order: it has 'a' in the place of 'b'"):
        trainer.load_states(tmp_path / "states")
    assert momenta(trainer) == [0.0, 0.0]
    trainer.close()
    trainer = trained("ab")
    trainer.load_states(tmp_path / "states")
    assert momenta(trainer) == [1.0, 8.0]
    trainer.close()
    with kv.create("local") as store:  # writes no names, as earlier versions did
        store.init([0, 1], [torch.zeros(2)] * 2)
        store.set_optimizer(trainer.optimizer)
        store.load_optimizer_states(tmp_path / "states")
        store.save_optimizer_states(tmp_path / "nameless")
    trainer = trained("xy")
    trainer.load_states(tmp_path / "nameless")
    assert momenta(trainer) == [1.0, 8.0]
    trainer.close()


def test_every_device_gets_the_states(tmp_path):
    here = {"kvstore": "device", "update_on_kvstore": False}
    trainer, replicas = made(devices=2, **here)
    train(trainer, replicas, 0, 3)
    trainer.save_checkpoint(tmp_path, 3).result()
    other, loaded = made(seed=1, devices=2, **here)
    other.load_checkpoint(tmp_path)
    for one in loaded:
        assert torch.equal(one[0], one[1])
    for step in (3, 4):
        for one in loaded:
            for replica in one:
                replica.grad = torch.full(replica.shape, float(step))
        other.step()
    for one in loaded:
        assert torch.equal(one[0], one[1])


def test_bfloat16_with_masters_goes_on_to_the_bit(tmp_path):
    def trained(seed):
        torch.manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(40).bfloat16())
        return Trainer([weight], "adam", {"learning_rate": 0.01, "multi_precision": True}, kvstore="dist"), weight

    def train(trainer, weight, begin, end):
        for step in range(begin, end):
            weight.grad = torch.randn(40, generator=torch.Generator().manual_seed(step)).bfloat16()
            trainer.step()

    trainer, weight = trained(0)
    train(trainer, weight, 0, 4)
    trainer.save_checkpoint(tmp_path, 4).result()
    train(trainer, weight, 4, 8)
    other, again = trained(1)
    other.load_checkpoint(tmp_path)
    train(other, again, 4, 8)
    assert torch.equal(weight, again)
    trainer.close()
    other.close()


def test_another_optimizer_or_another_network_is_refused_and_nothing_changes(tmp_path, where):
    trainer, replicas = made(**where)
    train(trainer, replicas, 0, 2)
    trainer.save_checkpoint(tmp_path, 2).result()
    trainer.close()
    other, replicas = made("adam", {"learning_rate": 0.1}, seed=1, **where)
    other.broadcast_parameters()
    before = weights_of(replicas)
    with pytest.raises(CheckpointError, match="holds the states of sgd"):
        other.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7"):
        other.load_checkpoint(tmp_path, 7)
    assert same(weights_of(replicas), before)
    other.load_checkpoint(tmp_path, states=False)
    assert not same(weights_of(replicas), before)
    other.close()
    third = Trainer([torch.nn.Parameter(torch.zeros(5, 4))], "sgd", {"momentum": 0.9}, **where)
    with pytest.raises(CheckpointError, match="key"):
        third.load_checkpoint(tmp_path)
    third.close()


def test_a_store_of_ones_own_says_that_it_cannot_be_saved(tmp_path):
    class Mine(kv.KVStoreBase):
        type, rank, num_workers = "mine", 0, 1

        def broadcast(self, key, value, out, priority=0):
            for one in out:
                one.data.copy_(value)

        def pushpull(self, key, value, out=None, priority=0):
            pass

        def is_capable(self, capability):
            return False

        def set_optimizer(self, optimizer):
            raise NotImplementedError

    trainer, _ = made(kvstore=Mine())
    with pytest.raises(NotImplementedError, match="cannot save its values"):
        trainer.save_states(tmp_path / "states")


def test_gradients_under_way_come_first(tmp_path):
    trainer, replicas = made(kvstore="dist", overlap=True)
    train(trainer, replicas, 0, 1)
    sum((one[0] ** 2).sum() for one in replicas).backward()
    calls = [lambda: trainer.save_checkpoint(tmp_path, 1), lambda: trainer.load_checkpoint(tmp_path)]
    calls += [lambda: trainer.save_states(tmp_path), lambda: trainer.load_states(tmp_path)]
    for call in calls:
        with pytest.raises(RuntimeError, match="while gradients of a backward pass are under way"):
            call()
    trainer.close()


def test_what_was_never_updated_takes_no_room_for_states(tmp_path):
    frozen = torch.nn.Parameter(torch.randn(50_000), requires_grad=False)
    weight = torch.nn.Parameter(torch.randn(10))
    trainer = Trainer([frozen, weight], "adam", kvstore="dist")
    weight.grad = torch.ones(10)
    trainer.step()
    folder = trainer.save_checkpoint(tmp_path, 1).result()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 210_000
    frozen.data.fill_(0.0)
    trainer.load_checkpoint(tmp_path)
    assert frozen.abs().max() > 0
    trainer.close()


def test_states_that_are_loaded_are_as_fresh_as_they_were(tmp_path, where):
    trainer, replicas = made(**where)
    trainer.broadcast_parameters()
    trainer.save_checkpoint(tmp_path, 0).result()
    train(trainer, replicas, 0, 2)
    expected = weights_of(replicas)
    train(trainer, replicas, 5, 6)
    trainer.load_checkpoint(tmp_path)
    train(trainer, replicas, 0, 2)
    assert same(weights_of(replicas), expected)
    trainer.close()


def test_the_learning_rate_of_a_schedule_goes_on_where_it_was(tmp_path, where):
    options = {"learning_rate": 1.0, "lr_scheduler": FactorScheduler(1, 0.5, base_lr=1.0)}
    trainer, replicas = made("sgd", options, **where)
    train(trainer, replicas, 0, 4)
    rate = trainer.learning_rate
    trainer.save_checkpoint(tmp_path, 4).result()
    trainer.close()
    other, _ = made("sgd", options, seed=1, **where)
    other.load_checkpoint(tmp_path)
    assert other.learning_rate == rate < 1.0
    other.close()


def test_a_checkpoint_that_could_not_be_written_is_told(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    trainer, replicas = made(**where)
    train(trainer, replicas, 0, 1)
    with pytest.raises(CheckpointError, match="could not be used for a checkpoint"):
        trainer.save_checkpoint(tmp_path / "file", 1).result()
    train(trainer, replicas, 1, 2)
    trainer.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["device", "dist"])
def test_tables_on_the_store_that_updates_are_saved_with_the_weights(tmp_path, kind):
    def started(seed):
        store = kv.create(kind)
        trainer, replicas = made("adam", {"learning_rate": 0.1, "lazy_update": True}, seed, kvstore=store)
        train(trainer, replicas, 0, 1)
        store.init(1000, LazyRows((10**9, 4), initializer="normal(0.1)"))
        return store, trainer, replicas

    def go_on(store, trainer, replicas, begin, end):
        for step in range(begin, end):
            train(trainer, replicas, step, step + 1)
            store.push(1000, RowSparse([step, 7 * step, 10**9 - 1], torch.full((3, 4), 1.0 + step), (10**9, 4)))
        rows = store.row_sparse_pull(1000, row_ids=[0, 1, 2, 3, 7, 14, 21, 28, 10**9 - 1])
        return [*weights_of(replicas), torch.as_tensor(rows.values)]

    with (one := started(0))[0]:
        go_on(*one, 1, 3)
        one[1].save_checkpoint(tmp_path, 3).result()
        expected = go_on(*one, 3, 5)
    with (other := started(1))[0]:
        go_on(*other, 20, 22)
        assert other[1].load_checkpoint(tmp_path).step == 3
        assert same(go_on(*other, 3, 5), expected)


@pytest.mark.filterwarnings("ignore")
def test_the_save_after_one_that_failed_says_so_where_workers_update(tmp_path):
    trainer, replicas = made(kvstore=None)
    train(trainer, replicas, 0, 1)
    (tmp_path / "step-1").write_text("in the way")
    future = trainer.save_checkpoint(tmp_path, 1)
    assert future.done()
    with pytest.raises(CheckpointError, match="the checkpoint before this one"):
        trainer.save_checkpoint(tmp_path, 2)
    assert trainer.save_checkpoint(tmp_path, 3).result().name == "step-3"
