"""The trainer against torch's own optimizers, and what it asks of a store."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from kvdist import QueueSampler, kv
from kvdist.errors import InitMismatch
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.optimizer import Adam, create
from kvdist.training import trainer as trainer_module
from kvdist.training import trainer_config
from kvdist.training.parameters import collect, identities, reordered
from kvdist.training.trainer import Trainer
from tests.cases import each

torch.set_num_threads(1)


class Cluster(KVStore):
    """A local store that passes for one on a cluster, and writes down what is asked of it."""

    def __init__(self, type_name="dist", num_workers=2, capable=True):
        super().__init__(LocalBackend(type_name))
        self.workers, self.capable, self.calls, self.optimizer = num_workers, capable, [], None
        self.statements, self.samples = [], []

    @property
    def num_workers(self):
        return self.workers

    @property
    def num_servers(self):
        return 2

    def is_capable(self, capability):
        return self.capable

    def set_optimizer(self, optimizer, **hyperparameters):
        self.optimizer = optimizer
        super().set_optimizer(optimizer, **hyperparameters)

    def agree(self, statement):
        self.statements.append(statement)

    def pushpull(self, key, value, out=None, priority=0, *, average=False, samples=0):
        self.calls.append((key, [None if one is None else len(one) for one in value], average))
        self.samples.append(samples)
        super().pushpull(key, value, out, priority, average=average)


@pytest.fixture
def created(monkeypatch):
    """The stores that trainers make by name; names on a cluster give a `Cluster`."""
    stores = []

    def create_store(name):
        stores.append(Cluster(name) if name.startswith("dist") else KVStore(LocalBackend(name)))
        return stores[-1]

    monkeypatch.setattr(trainer_module, "create_store", create_store)
    return stores


def parameter(number=0.0, shape=(10,)):
    return nn.Parameter(torch.full(shape, number))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(replicas):
    """A loss whose gradient is 1 on every device, as in the mirrored system's tests."""
    for replica in replicas:
        replica.grad = None
        (replica + 1).sum().backward()


def assert_all(tensors, number):
    for tensor in tensors:
        np.testing.assert_allclose(tensor.detach().numpy(), number, rtol=1e-6)


# Against torch.


@pytest.mark.parametrize("kvstore", [None, "device", "local", "store", "dist"])
@pytest.mark.parametrize(
    ("name", "numbers", "theirs"),
    [
        ("sgd", {"learning_rate": 0.1}, lambda params: torch.optim.SGD(params, lr=0.1)),
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9}, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        ("adam", {"learning_rate": 0.01}, lambda params: torch.optim.Adam(params, lr=0.01)),
    ],
)
def test_training_is_the_same_as_with_torch(created, kvstore, name, numbers, theirs):
    ours, other = network(), network()
    trainer = Trainer(
        ours.parameters(), name, numbers, kvstore=KVStore(LocalBackend("device")) if kvstore == "store" else kvstore
    )
    optimizer = theirs(other.parameters())
    for _ in range(20):
        x = torch.randn(6, 5)
        for net, step in ((ours, trainer.step), (other, optimizer.step)):
            net.zero_grad()
            net(x).square().mean().backward()
            step()
    for mine, expected in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_replicas_on_two_devices_train_as_one_network_on_the_whole_batch(created, update_on_kvstore):
    nets, other = [network(1), network(2)], network(1)
    replicas = zip(*(net.parameters() for net in nets), strict=True)
    trainer = Trainer(replicas, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, update_on_kvstore=update_on_kvstore)
    trainer.broadcast_parameters()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(8, 5)
        for net, part in zip(nets, x.chunk(2), strict=True):
            net.zero_grad()
            (net(part).square().mean() if step % 2 else net(part).square().sum()).backward()
        trainer.step() if step % 2 else trainer.step(8 * 3)
        optimizer.zero_grad()
        other(x).square().mean().backward()
        optimizer.step()
    for first, second, expected in zip(*(net.parameters() for net in [*nets, other]), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kvstore", [None, "dist"])
def test_every_floating_type_is_trained(created, kvstore, dtype):
    weight = nn.Parameter(torch.ones(3, 2, dtype=dtype).t())  # not contiguous
    trainer = Trainer([weight], "sgd", {"learning_rate": 0.5}, kvstore=kvstore)
    (weight * 2).sum().backward()
    trainer.step()
    assert weight.tolist() == [[0, 0, 0], [0, 0, 0]]


# Numbers of the mirrored system's own tests.


@pytest.mark.parametrize("kvstore", ["local", "device", "dist"])
def test_momentum_and_a_changed_lr_mult_give_the_known_numbers(created, kvstore):
    replicas = [parameter(), parameter()]
    trainer = Trainer([replicas], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore=kvstore)
    backward(replicas)
    trainer.step(1)
    assert_all(replicas, -2)
    trainer.optimizer.lr_mult[0] = 0.5
    backward(replicas)
    trainer.step(1)
    assert_all(replicas, -4)
    with pytest.raises(RuntimeError, match=r"update\(\) cannot be used.*update_on_kvstore=False"):
        trainer.update(1)
    with pytest.raises(RuntimeError, match=r"allreduce_grads\(\) cannot be used"):
        trainer.allreduce_grads()


@pytest.mark.parametrize("kvstore", ["local", "device", "dist"])
def test_gradients_can_be_summed_and_weights_updated_in_two_calls(created, kvstore):
    replicas = [parameter(), parameter()]
    trainer = Trainer([replicas], "sgd", {"learning_rate": 0.5}, kvstore=kvstore, update_on_kvstore=False)
    for i, replica in enumerate(replicas):
        (replica * i).sum().backward()
    trainer.allreduce_grads()
    assert_all([replica.grad for replica in replicas], 1)
    assert_all(replicas, 0)
    trainer.update(1)
    assert_all(replicas, -0.5)


def test_on_one_device_there_is_no_store_and_momentum_is_kept(created):
    weight = parameter()
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    for expected in (-1, -2.5):
        backward([weight])
        trainer.step(1)
        assert_all([weight], expected)
    assert trainer.kvstore is None and created[0].type == "device"


def test_weights_put_back_by_hand_are_everybodys_after_broadcast_parameters(created):
    replicas = [parameter(), parameter()]
    trainer = Trainer([replicas], "sgd", {"learning_rate": 0.1}, kvstore="device")
    backward(replicas)
    trainer.step(1)
    with torch.no_grad():
        replicas[0].zero_()
    trainer.broadcast_parameters()
    assert_all(replicas, 0)
    backward(replicas)
    trainer.step(1)
    assert_all(replicas, -0.2)


def test_eight_layers_on_two_devices_train_with_shared_parameters_kept_once(created):
    def layers():
        return nn.Sequential(*(nn.Linear(10, 10) for _ in range(8)))

    nets = [layers(), layers()]
    for net in nets:
        net[7].weight = net[0].weight
    shared = list(zip(*([*net.parameters(), net[0].weight] for net in nets), strict=True))
    trainer = Trainer(shared, "sgd", {"learning_rate": 0.1}, kvstore=(store := Cluster()))
    for net in nets:
        net(torch.ones(3, 10)).sum().backward()
    trainer.step(6)
    assert len(store.calls[0][0]) == 15
    assert nets[0][7].weight is nets[0][0].weight
    assert torch.equal(nets[0][0].weight, nets[1][7].weight)


# What is asked of the store.


@pytest.mark.parametrize(
    ("kvstore", "devices", "wanted", "expected"),
    [
        (None, 1, None, None),
        (None, 1, True, None),
        ("device", 1, None, None),
        ("local", 1, True, None),
        ("device", 2, None, True),
        ("device", 2, True, True),
        ("device", 2, False, False),
        ("local", 2, None, True),
        ("local", 2, False, False),
        ("dist", 1, None, True),
        ("dist", 1, False, False),
        ("dist", 2, True, True),
        ("dist_async", 1, None, True),
        ("dist_async", 1, True, True),
    ],
)
def test_who_updates_the_weights(created, kvstore, devices, wanted, expected):
    replicas = [parameter() for _ in range(devices)]
    trainer = Trainer([replicas], "sgd", {"learning_rate": 0.1}, kvstore=kvstore, update_on_kvstore=wanted)
    backward(replicas)
    trainer.step(1)
    assert_all(replicas, -0.1 * devices)
    assert (trainer.kvstore is None) == (expected is None)
    if expected:
        with pytest.raises(RuntimeError, match="while the store updates"):
            trainer.update(1)
    else:
        backward(replicas)
        trainer.update(1)


def test_a_store_object_is_used_also_with_one_device():
    trainer = Trainer(
        [weight := parameter()], "sgd", {"learning_rate": 1.0}, kvstore=(store := KVStore(LocalBackend("device")))
    )
    backward([weight])
    trainer.step(1)
    assert trainer.kvstore is store
    assert_all([weight], -1)
    np.testing.assert_array_equal(store.pull(0), weight.detach())


def test_the_store_local_leaves_big_parameters_to_the_devices(created, monkeypatch):
    monkeypatch.setattr(trainer_config, "BIG_PARAMETER_ELEMENTS", 9)
    for kvstore, expected in (("local", False), ("device", True)):
        replicas = [parameter(), parameter()]
        trainer = Trainer([replicas], "sgd", kvstore=kvstore)
        trainer.broadcast_parameters()
        assert trainer._steps.on_server is expected


def test_asynchronous_stores_and_stores_that_cannot_update_say_what_they_need():
    with pytest.raises(ValueError, match="'dist_async' trains asynchronously, which needs update_on_kvstore=True"):
        Trainer([parameter()], "sgd", kvstore=Cluster("dist_async"), update_on_kvstore=False).broadcast_parameters()
    with pytest.raises(ValueError, match="cannot update weights, but update_on_kvstore=True asks for it; leave it out"):
        Trainer([parameter()], "sgd", kvstore=Cluster(capable=False), update_on_kvstore=True).broadcast_parameters()
    trainer = Trainer([weight := parameter()], "sgd", {"learning_rate": 1.0}, kvstore=Cluster(capable=False))
    backward([weight])
    trainer.step(1)
    backward([weight])
    trainer.update(1)
    assert_all([weight], -2)


def test_all_gradients_travel_in_one_call_in_the_order_of_the_parameters():
    net = network()
    trainer = Trainer(net.parameters(), "sgd", kvstore=(store := Cluster()))
    for batch_size in (None, 4):
        net(torch.ones(2, 5)).sum().backward()
        trainer.step(batch_size)
    assert store.calls == [([0, 1, 2, 3], [1, 1, 1, 1], True), ([0, 1, 2, 3], [1, 1, 1, 1], False)]
    assert store.optimizer is trainer.optimizer


def test_the_learning_rate_and_the_batch_size_reach_the_optimizer_of_the_store():
    weight, store = parameter(), Cluster()
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0, "rescale_grad": 2}, kvstore=store)
    backward([weight])
    trainer.step(4)
    assert_all([weight], -0.5)
    trainer.set_learning_rate(3)
    assert trainer.learning_rate == store.optimizer.learning_rate == 3
    backward([weight])
    trainer.step(2)
    assert_all([weight], -3.5)


@each("update_on_kvstore", [True, False])
def test_a_parameter_without_a_gradient_is_pushed_as_nothing_and_stays(update_on_kvstore):
    used, unused = parameter(), parameter(5.0)
    store = Cluster()
    trainer = Trainer([unused, used], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=update_on_kvstore)
    for _ in range(2):
        backward([used])
        trainer.step(1)
    assert_all([used], -2)
    assert_all([unused], 5)
    assert len(store.calls) == 2
    if update_on_kvstore:
        assert store.calls[0][:2] == ([0, 1], [None, 1])


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_where_only_one_device_has_a_gradient_all_get_the_update(created, update_on_kvstore):
    replicas = [parameter(), parameter()]
    trainer = Trainer([replicas], "sgd", {"learning_rate": 1.0}, update_on_kvstore=update_on_kvstore)
    backward(replicas[1:])
    trainer.step(1)
    assert_all(replicas, -1)


@pytest.mark.parametrize("kvstore", [None, "device", "dist"])
def test_a_frozen_parameter_is_broadcast_but_not_trained(created, kvstore):
    frozen = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
    trainer = Trainer([frozen, weight := parameter()], "sgd", {"learning_rate": 1.0, "wd": 0.1}, kvstore=kvstore)
    backward([weight])
    trainer.step(1)
    assert_all([frozen], 7)
    assert_all([weight], -1)
    if kvstore == "dist":
        assert created[0].calls[0][0] == [1]
        np.testing.assert_array_equal(created[0].pull(0), frozen)


def test_two_trainers_cannot_share_a_store():
    store = KVStore(LocalBackend("device"))
    Trainer([parameter()], "sgd", kvstore=store).broadcast_parameters()
    with pytest.raises(ValueError, match=r"another Trainer uses it.*kv.create\('device'\)"):
        Trainer([parameter()], "sgd", kvstore=store).broadcast_parameters()


def test_a_backward_pass_through_weights_that_a_step_changed_raises():
    weight = parameter(1.0)
    trainer = Trainer([weight], "sgd", kvstore=None)
    loss = weight.square().sum()
    weight.grad = torch.ones(10)
    trainer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Parameters.


def test_a_dict_is_taken_in_the_order_of_its_names_and_a_list_as_it_is():
    weights = {name: parameter(shape=(size,)) for size, name in enumerate(["b", "c", "a"], start=1)}
    for given, sizes in ((weights, [3, 1, 2]), (list(weights.values()), [1, 2, 3]), (weights.items(), [1, 2, 3])):
        trainer = Trainer(given, "sgd", kvstore=(store := KVStore(LocalBackend("device"))))
        trainer.broadcast_parameters()
        assert [len(store.pull(key)) for key in range(3)] == sizes


@pytest.mark.parametrize("kvstore", [None, "dist"])
def test_groups_have_multipliers_of_their_own(created, kvstore):
    first, second, third = parameter(1.0), parameter(1.0), parameter(1.0)
    groups = [{"params": first, "lr_mult": 2}, {"params": iter([second]), "wd_mult": 0}, {"params": [third]}]
    trainer = Trainer(groups, "sgd", {"learning_rate": 0.5, "wd": 0.2}, kvstore=kvstore)
    for weight in (first, second, third):
        weight.sum().backward()
    trainer.step()
    assert_all([first], 1 - 1.2)
    assert_all([second], 1 - 0.5)
    assert_all([third], 1 - 0.6)


@each(
    "params, error, message",
    [
        (nn.Linear(1, 1), TypeError, r"give the network's parameters, not the network: net.named_parameters"),
        (parameter(), TypeError, "params must be parameters"),
        (5, TypeError, "not int"),
        ([], ValueError, "no parameters to train: the list is empty"),
        (["w"], TypeError, "parameter 0 must be a torch parameter or a list of its replicas, not str"),
        ([[]], ValueError, "parameter 0 has no replica"),
        ([parameter() * 2], ValueError, "parameter 0 is the result of a computation"),
        ([[parameter(), parameter(shape=(3,))]], ValueError, r"replicas of parameter 0 differ: \(10,\)"),
        ([[parameter()], [parameter(), parameter()]], ValueError, "parameter 0 on 1 and parameter 1 on 2"),
        (nn.Linear(1, 1).state_dict(), ValueError, "no parameter requires grad; state_dict"),
        ([nn.Parameter(torch.zeros(1, dtype=torch.complex64))], TypeError, "complex64 are not supported"),
        ([{"params": [parameter()], "lr": 0.1}], ValueError, "cannot have 'lr': give 'lr_mult'"),
        ([{"params": [parameter()], "weight_decay": 0.1}], ValueError, "cannot have 'weight_decay': give 'wd_mult'"),
        ([{"params": [parameter()], "betas": 0.1}], ValueError, "cannot have 'betas': a group has params, lr_mult"),
        ([{"lr_mult": 1}], ValueError, "needs 'params'"),
        ([{"params": [parameter()]}, parameter()], TypeError, "mixes groups and parameters"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        Trainer(params, "sgd")


def test_an_unknown_optimizer_is_refused():
    weights = [parameter()]
    with pytest.raises(ValueError, match="unknown optimizer 'addam'"):
        Trainer(weights, "addam")
    with pytest.raises(TypeError, match="no hyper-parameter lr .*learning_rate"):
        Trainer(weights, "adam", {"lr": 0.1})
    with pytest.raises(TypeError, match="takes no further hyper-parameters"):
        Trainer(weights, create("adam"), {"learning_rate": 0.1})


@each("optimizer", ["sgd", torch.optim.SGD([parameter()], 0.1)])
@each("third, kind", [(Cluster(), "Cluster"), ("dist", "'dist'")])
def test_a_store_in_the_place_of_hyper_parameters_is_told_where_it_belongs(optimizer, third, kind):
    message = f"the third argument, optimizer_params, .* not {kind}; write Trainer\\(params, optimizer, kvstore=…\\)"
    with pytest.raises(TypeError, match=message):
        Trainer([parameter()], optimizer, third)
    with pytest.raises(TypeError, match=r"the third argument, optimizer_params, .* not float; give a dict, or nothing"):
        Trainer([parameter()], optimizer, 0.1)


def test_a_store_in_the_place_of_parameters_or_optimizer_is_told_where_it_belongs():
    with pytest.raises(TypeError, match="the first argument, params, .* not a Cluster; write Trainer"):
        Trainer(Cluster(), [parameter()], "sgd")
    with pytest.raises(TypeError, match="the first argument, params, .* not 'sgd'; write Trainer"):
        Trainer("sgd", [parameter()])
    with pytest.raises(TypeError, match=r"the second argument, optimizer, .* not a Cluster; write .* kvstore=…\)"):
        Trainer([parameter()], Cluster())


def test_a_misspelled_store_is_refused_when_the_trainer_is_created():
    with pytest.raises(ValueError, match=r"there is no store called 'dst'; did you mean dist\?"):
        Trainer([parameter()], "sgd", kvstore="dst")


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="replicas on 2 devices, whose gradients only a store sums"):
        Trainer([[parameter(), parameter()]], "sgd", kvstore=None)
    with pytest.raises(ValueError, match="compression_params need a store"):
        Trainer([parameter()], "sgd", kvstore=None, compression_params={"type": "2bit"})
    with pytest.raises(ValueError, match="known are '2bit'"):
        Trainer([parameter()], "sgd", compression_params={"type": "4bit"})
    with pytest.raises(ValueError, match="have no 'type'"):
        Trainer([parameter()], "sgd", compression_params={})
    for batch_size in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="batch_size is"):
            Trainer([parameter()], "sgd", kvstore=None).step(batch_size)
    for wrong, shown in (("32", "'32' of type str"), (torch.zeros(3), "a Tensor|of type Tensor")):
        with pytest.raises(TypeError, match=f"batch_size must be a number, not .*({shown})"):
            Trainer([parameter()], "sgd", kvstore=None).step(wrong)
        with pytest.raises(TypeError, match=f"samples must be a number, not .*({shown})"):
            Trainer([parameter()], "sgd", kvstore=None).step(samples=wrong)


@each("kvstore", [None, "local", "dist"])
def test_a_sparse_gradient_trains_as_the_dense_one_would(kvstore):
    tables = [nn.Embedding(4, 2, sparse=sparse, _weight=torch.ones(4, 2)) for sparse in (True, False)]
    trainers = [Trainer(table.parameters(), "sgd", {"learning_rate": 1, "momentum": 0.5}, kvstore) for table in tables]
    for ids in ([1, 1, 3], [0, 1]):
        for table, trainer in zip(tables, trainers, strict=True):
            table.zero_grad()
            table(torch.tensor(ids)).sum().backward()
            trainer.step()
    assert tables[0].weight.tolist() == tables[1].weight.tolist() == [[0, 0], [-3, -3], [1, 1], [-0.5, -0.5]]
    for trainer in trainers:
        trainer.close()


def test_a_trainer_that_updates_alone_in_a_cluster_says_so(monkeypatch, caplog):
    for name, value in {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "9000",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
    }.items():
        monkeypatch.setenv(name, value)
    net = torch.nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}).step()
    (record,) = caplog.records
    assert "one of 2" in record.message and "Pass kvstore='dist'" in record.message


def test_a_store_of_another_kind_is_a_type_error():
    with pytest.raises(TypeError, match="kvstore must be the name of a store"):
        Trainer(torch.nn.Linear(2, 1).parameters(), "sgd", kvstore=3)


def test_the_servers_hear_how_many_examples_a_gluon_step_sums():
    weight = parameter()
    trainer = Trainer([weight], "sgd", kvstore=(store := Cluster()))
    for batch_size in (3, None, 5):
        backward([weight])
        trainer.step(batch_size)
    assert store.samples == [3, 0, 5]


def test_what_workers_must_have_in_common_is_said_before_the_first_step():
    net = network()
    for frozen in (0, 2):
        list(net.parameters())[frozen].requires_grad = False
    for here in (False, True):
        store = Cluster()
        numbers = {"learning_rate": 0.25}
        trainer = Trainer(net.parameters(), "sgd", numbers, kvstore=store, update_on_kvstore=not here)
        trainer.broadcast_parameters()
        trainer.broadcast_parameters()
        (statement,) = store.statements
        assert statement.startswith("4 parameters, trained are 1, 3")
        # A store that updates compares the numbers itself, at each round.
        assert ("'learning_rate': 0.25" in statement) == here


def test_where_workers_update_each_divides_its_gradients_before_they_are_summed():
    weight = parameter()
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=Cluster(), update_on_kvstore=False)
    for batch_size, expected in ((2, -0.5), (4, -0.75)):
        backward([weight])
        trainer.step(batch_size)
        assert_all([weight.grad], 1 / batch_size)
        assert_all([weight], expected)


def through_file(value):
    file = io.BytesIO()
    torch.save({"one": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["one"]


@each("copied", [copy.copy, copy.deepcopy, pickle.dumps, through_file])
def test_what_belongs_to_a_trainer_is_not_copied(copied):
    net = torch.nn.Linear(2, 1)
    given = torch.optim.Adam(net.parameters(), lr=0.1)
    trainer = Trainer(net.parameters(), given, kvstore=None)
    sampler = QueueSampler(8)
    assert len(copied(given.param_groups))  # what a user saves by itself is the user's
    for inputs in trainer.batches(torch.utils.data.DataLoader(range(8), 4, sampler=sampler)):
        net(inputs.float().reshape(2, 2)).sum().backward()
        trainer.step()
        net.zero_grad()
    refused = [trainer, given, trainer.as_torch_optimizer(), sampler]
    for one in refused:
        with pytest.raises(TypeError, match="copied"):
            copied(one)
    copied(net)
    copied(trainer.as_torch_optimizer().state_dict())


def test_an_optimizer_of_ours_keeps_nothing_of_the_batch_and_has_one_trainer():
    given = Adam(learning_rate=0.1, rescale_grad=0.5)
    parameter = torch.nn.Parameter(torch.ones(2))
    trainer = Trainer([parameter], given, kvstore=kv.create("device"))
    parameter.sum().backward()
    trainer.step(32)
    assert copy.deepcopy(given).rescale_grad == 0.5
    for kvstore in (None, "device"):
        with pytest.raises(ValueError, match="belongs to another Trainer"):
            Trainer([torch.nn.Parameter(torch.ones(2))], given, kvstore=kvstore)
    with pytest.raises(ValueError, match="no parameters to train"):
        Trainer([], other := Adam(learning_rate=0.1))
    Trainer([parameter], other, kvstore=None)  # which no trainer has got


@each("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
@each("options", [{}, {"overlap": True}, {"update_on_kvstore": False}, {"policy": "async:1"}])
def test_a_copy_of_an_optimizer_has_nothing_of_its_trainer_nor_has_one_whose_trainer_was_closed(copied, options):
    given = create("torch.sgd", lr=1.0, momentum=0.5)
    given.set_wd_mult({"mine": 2.0})
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 0.5}, {"params": [parameters[1]], "momentum": 0.25}]
    policy = options.get("policy")
    with kv.create("dist", policy=policy) as store:
        rest = {} if policy else options
        trainer = Trainer(groups, given, kvstore=store, **rest)
        sum(one.sum() for one in parameters).backward()
        if "overlap" in options:
            trainer.step()
        elif "update_on_kvstore" not in options:
            trainer.step(32)

        def require_as_made(one):
            assert (one.rescale_grad, one.lr_mult, one.wd_mult) == (1.0, {}, {"mine": 2.0})
            assert (one.groups, one.momentum) == ("", 0.5)

        other = copied(given)
        require_as_made(other)
        other.set_lr_mult({0: 7.0})
        assert given.lr_mult.get(0) != 7.0
        weight = torch.nn.Parameter(torch.zeros(2))
        second = Trainer([weight], copied(given), kvstore=None)
        weight.sum().backward()
        second.step()
        assert weight[0].item() == -given.learning_rate
    trainer.close()
    require_as_made(given)
    Trainer([weight], given, kvstore=None)


def test_an_optimizer_of_a_store_that_stays_open_keeps_the_rule_that_its_trainer_gave_it():
    given, weight = create("torch.sgd", lr=1.0, momentum=0.5), torch.nn.Parameter(torch.zeros(2))
    with kv.create("dist") as store:
        trainer = Trainer([{"params": [weight], "momentum": 0.25}], given, kvstore=store)
        weight.sum().backward()
        trainer.step()
        trainer.close()
        with pytest.raises(ValueError, match="belongs to another Trainer"):
            Trainer([weight], given, kvstore=None)


@each("given", [lambda one: {one}, lambda one: frozenset([one]), lambda one: [{"params": {one}}]])
def test_a_set_of_parameters_needs_names_as_it_has_no_order(given):
    with pytest.raises(TypeError, match=r"in a set, whose order differs .*net\.named_parameters\(\)"):
        Trainer(given(parameter()), "sgd", kvstore=None)
    Trainer(given(("w", parameter())), "sgd", kvstore=None)


def test_of_equal_names_the_places_count():
    def known_by(*names):
        given = [parameter() if name is None else (name, parameter()) for name in names]
        return identities(collect(given))

    assert known_by(None, None) is None
    assert reordered(known_by("w", "b", "w", None), known_by("b", "w", "w", None)) == [1, 0, 2, 3]
    with pytest.raises(InitMismatch, match="other names than those of worker 0"):
        reordered(known_by("w", "b"), known_by("w", "c"))


@each("kvstore", [None, "device", "dist"])
@each("options", [{}, {"update_on_kvstore": False}, {"overlap": True}])
@each("late", [False, True])
def test_a_step_without_any_gradient_is_told_once(caplog, kvstore, options, late):
    if kvstore != "dist" and options:
        kvstore = "device"
    caplog.clear()
    net = torch.nn.Linear(2, 1)
    trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore, **options)
    for step in range(4):
        if step == 2 * late:
            net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
            assert "found no gradient" not in caplog.text
        for one in trainer._model.parameters:
            one.replicas[0].grad = None
        net.zero_grad()
        net(torch.ones(4, 2)).sum().backward()
        trainer.step()
    trainer.close()
    said = "step() found no gradient of the 2 trained parameters ('weight', ...): call loss.backward() before step()."
    assert caplog.text.count(said) == 1
    trainer = Trainer([parameter()], "sgd", kvstore=kvstore)
    trainer.skip_step()
    trainer.close()
    assert caplog.text.count("step() found no gradient") == 1


class Unsteady(Cluster):
    """A store whose workers agree, and which takes values, from the second time on."""

    def __init__(self, fails):
        super().__init__()
        self.fails = [*fails]

    def agree(self, statement):
        self._fail("agree")

    def broadcast(self, key, value, out, priority=0):
        super().broadcast(key, value, out, priority)
        self._fail("broadcast")

    def replace_optimizer_states(self, keys, states):
        self._fail("states")
        super().replace_optimizer_states(keys, states)

    def _fail(self, what):
        if what in self.fails:
            self.fails.remove(what)
            raise InitMismatch(what)


def test_a_first_step_that_fails_can_be_tried_again(monkeypatch):
    stores = []
    monkeypatch.setattr(trainer_module, "create_store", lambda name: stores.append(Unsteady(fails)) or stores[-1])
    weight = parameter(1.0)
    saved = Trainer([weight], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore=None)
    backward([weight])
    saved.step()
    state = saved.as_torch_optimizer().state_dict()
    for overlap in (False, True):
        fails = ["agree", "broadcast", "states"]
        weight = parameter(1.0)
        numbers = {"learning_rate": 1.0, "momentum": 0.5}
        trainer = Trainer([weight], "sgd", numbers, kvstore="dist", overlap=overlap)
        trainer.as_torch_optimizer().load_state_dict(state)
        for expected in ("agree", "broadcast", "states"):
            with pytest.raises(InitMismatch, match=expected):
                trainer.broadcast_parameters()
        backward([weight])
        trainer.step()
        assert_all([weight], 1.0 - 1.5)  # the loaded momentum of 1 counts
        store = stores[-1]
        assert len(store._backend.rollback_watchers) == 1
        trainer.close()
        assert store._closed
    assert len(stores) == 2, "one for each trainer"


def test_a_parameter_of_a_type_that_is_not_trained_is_refused_by_its_name():
    for given in (torch.tensor([1 + 0j]), torch.zeros(2).to(torch.float8_e4m3fn)):
        with pytest.raises(TypeError, match=r"^layer\.w cannot be a parameter of a Trainer: .*\. Remedy: "):
            Trainer([("layer.w", nn.Parameter(given))], "sgd", kvstore="device")


@pytest.mark.filterwarnings("ignore:torch.quantize")
@each(
    "make, words",
    [
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), r"\.resolve_conj\(\)"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, r"\.resolve_neg\(\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"\.dequantize\(\)"),
        (lambda: torch.ones(2, 2, dtype=torch.complex64).to_sparse(), r"\.to_dense\(\)"),
        (lambda: torch.ones(2, 3, dtype=torch.bool).t(), r"contiguous in memory.*\.contiguous\(\)"),
    ],
)
def test_a_frozen_parameter_whose_memory_is_not_its_elements_is_refused_by_its_name(make, words):
    given = [("w", nn.Parameter(torch.ones(2))), ("layer.mask", nn.Parameter(make(), requires_grad=False))]
    with pytest.raises(TypeError, match=rf"^layer\.mask cannot be a parameter .*{words}.*convert it before"):
        Trainer(given, "sgd", kvstore="device")
