"""Workers that list the same named parameters in different orders: ``orders.py SCENARIO``.

After a step with the learning rate 1 a weight has moved by its gradient, or by half of it in a group with that factor.
"""

import os
import signal
import sys

import torch

import kvdist
from kvdist import Trainer, kv

FIRST = {"a": 1.0, "b": 5.0, "c": 9.0, "frozen": 7.0}
GRADIENTS = {"a": 1.0, "b": 2.0, "c": 4.0}
RATES = {"a": 1.0, "b": 1.0, "c": 0.5}


def parameters(rank, first=FIRST):
    """Four parameters of one shape, in an order of this rank's own; the first values are those of rank 0."""
    turned = list(first)[rank % 4 :] + list(first)[: rank % 4]
    values = {name: torch.full((3,), first[name] if rank == 0 else 100.0 + rank) for name in turned}
    return {name: torch.nn.Parameter(value, requires_grad=name != "frozen") for name, value in values.items()}


def groups_of(named):
    return [{"params": [pair], "lr_mult": RATES.get(pair[0], 1.0)} for pair in named.items()]


def backward(named):
    for parameter in named.values():
        parameter.grad = None
    sum(gradient * named[name].sum() for name, gradient in GRADIENTS.items()).backward()


def say(what, named):
    print(what, {name: named[name][0].item() for name in sorted(named)}, flush=True)


def stores():
    """Every store and policy, with the factors of groups."""
    policies = (kvdist.local_sgd(1), kvdist.quota(2), kvdist.quota(2, local_steps=True, exact=True))
    kinds = [("dist", None), ("dist_async", None), ("collective", None), ("hybrid", None)]
    for kind, policy in kinds + [("dist", policy) for policy in policies]:
        for here in (True, False) if (kind, policy) == ("dist", None) else (False,):
            with kv.create(kind, **({} if policy is None else {"policy": policy})) as store:
                named = parameters(store.rank)
                options = {"update_on_kvstore": False} if here else {}
                trainer = Trainer(groups_of(named), "sgd", {"learning_rate": 1.0}, kvstore=store, **options)
                backward(named)
                trainer.step(samples=1) if policy is not None else trainer.step()
                trainer.exchange()
                store.barrier()
                if kind == "dist_async":  # each of two pushes is a step
                    trainer._steps.fetch()
                say(f"{kind} {policy} {here}", named)


def optimizers():
    """torch's optimizers: numbers of a group, a schedule and a loaded state are those of the parameter's name."""
    with kv.create("dist") as store:
        named = parameters(store.rank)
        groups = [{"params": [one], "lr": RATES.get(name, 1.0)} for name, one in named.items()]
        groups[list(named).index("b")]["momentum"] = 0.5
        trainer = Trainer(named.items(), torch.optim.SGD(groups, lr=1.0), kvstore=store)
        saved = torch.optim.SGD([{**group, "params": group["params"]} for group in groups], lr=1.0)
        saved.state[named["b"]]["momentum_buffer"] = torch.full((3,), 8.0)
        state = saved.state_dict()
        trainer.as_torch_optimizer().load_state_dict(state)
        backward(named)
        trainer.step()
        say("optimizer", named)
        found = trainer.as_torch_optimizer().state_dict()["state"]
        place = list(named).index("b")
        print("momentum", found[place]["momentum_buffer"][0].item(), flush=True)


def checkpoints():
    """A checkpoint has the order of rank 0; one in another order is refused."""
    folder = sys.argv[2]
    for update_on_kvstore in (True, False):
        for turn in (0, 1):
            with kv.create("dist") as store:
                named = parameters(store.rank)
                if turn:
                    named = dict(reversed(named.items()))
                options = {"kvstore": store, "update_on_kvstore": update_on_kvstore}
                trainer = Trainer(named.items(), "sgd", {"learning_rate": 1.0}, **options)
                if not turn:
                    backward(named)
                    trainer.step()
                    trainer.save_checkpoint(f"{folder}/{update_on_kvstore}", 1).result()
                    trainer.load_checkpoint(f"{folder}/{update_on_kvstore}")
                    say("loaded", named)
                    continue
                try:
                    trainer.load_checkpoint(f"{folder}/{update_on_kvstore}")
                except kvdist.CheckpointError as error:
                    print("refused:", error, flush=True)


def carried():
    """What is not trained comes from rank 0, whatever its type; buffers are matched by their names."""
    with kv.create("dist") as store:
        for update_on_kvstore in (True, False):
            net = torch.nn.Linear(2, 1)
            flags = torch.tensor([True, False]) if store.rank == 0 else torch.tensor([False, False])
            net.flags = torch.nn.Parameter(flags, requires_grad=False)
            buffers = {
                "seen": torch.full((2,), 300 + store.rank, dtype=torch.int16),
                "left": torch.full((2,), 400 + store.rank, dtype=torch.int16),
                "wave": torch.tensor([1 + 1j, 2 - 1j]) * (1 + store.rank),
                "bits": torch.tensor(store.rank == 0),
            }
            for name in sorted(buffers, reverse=bool(store.rank)):
                net.register_buffer(name, buffers[name])
            with kv.create("dist") as own:
                options = {"kvstore": own, "update_on_kvstore": update_on_kvstore}
                trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 1.0}, **options)
                net(torch.ones(1, 2)).sum().backward()
                trainer.step()
                folder = f"{sys.argv[2]}/{update_on_kvstore}"
                trainer.save_checkpoint(folder, 1).result()
                net.flags.logical_not_()
                trainer.load_checkpoint(folder)
                kvdist.sync_buffers(net, own)
            found = [net.flags.tolist(), net.seen.tolist(), net.left.tolist(), net.wave.tolist(), net.bits.item()]
            print("carried", found, flush=True)


def buffers():
    """Networks whose buffers have other names, shapes or types, or that have none, are refused; nothing is changed."""
    differing = {
        "name": {"a": torch.tensor([1.0]), "m": torch.tensor([11.0])},
        "late name": {**{f"b{i:04}": torch.zeros(1) for i in range(2000)}, "z": torch.tensor([0.0])},
        "shape": {"m": torch.tensor([1.0, 11.0]), "z": torch.zeros(0)},
        "type": {"m": torch.tensor([11.0], dtype=torch.float64), "z": torch.tensor([0.0])},
        "none": {},
    }
    for kind in ("dist", "collective"):
        for what, others in differing.items():
            with kv.create(kind) as store:
                mine = others
                if store.rank == 0:
                    mine = {"m": torch.tensor([10.0]), "z": torch.tensor([0.0])}
                    if what == "late name":
                        mine = {**others, "y": torch.tensor([0.0])}
                        del mine["z"]
                net = torch.nn.Module()
                for name, buffer in mine.items():
                    net.register_buffer(name, buffer.clone())
                try:
                    kvdist.sync_buffers(net, store)
                except kvdist.InitMismatch:
                    assert all(torch.equal(found, mine[name]) for name, found in net.named_buffers())
                    print("refused:", what, kind, flush=True)


def names():
    """Other names, and none, are refused."""
    for mine in ({"a": 1.0, "b": 2.0}, {"a": 1.0, "x": 2.0}):
        with kv.create("dist") as store:
            named = parameters(0, mine if store.rank else {"a": 1.0, "b": 2.0})
            given = named.items() if "x" in mine or store.rank == 0 else named.values()
            try:
                Trainer(list(given), "sgd", kvstore=store).broadcast_parameters()
            except kvdist.InitMismatch as error:
                print("refused:", error, flush=True)


def returns():
    """Worker 1 is killed, and lists its parameters in another order in its second life, which says when to end."""
    store = kv.create("dist")
    is_back = bool(os.environ.get("KVDIST_RESTARTS"))
    named = parameters(store.rank + is_back)
    trainer = Trainer(groups_of(named), "sgd", {"learning_rate": 1.0}, kvstore=store)
    since = trainer.version
    while not os.path.exists(sys.argv[2]):
        backward(named)
        trainer.step()
        if store.rank == 1 and not is_back and trainer.version == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_back and trainer.version == since + 5:
            open(sys.argv[2], "w").close()
    steps = FIRST["a"] - named["a"][0].item()
    expected = {name: FIRST[name] - steps * GRADIENTS[name] * RATES[name] for name in GRADIENTS} | {"frozen": 7.0}
    print("returned", {name: named[name][0].item() for name in expected} == expected, flush=True)
    store.close()


with kv.create("local" if sys.argv[1] == "returns" else "dist"):  # which keeps the process in the cluster
    globals()[sys.argv[1]]()
