"""Parameters that show the servers' memory, one scenario a function: ``shared_weights.py SCENARIO``."""

import hashlib
import os
import sys

import torch

from kvdist import Trainer, kv


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.ReLU(), torch.nn.Linear(700, 1100))


def trained(share, steps=6, optimizer="adam"):
    """The network after some steps, its trainer and its store."""
    store = kv.create("dist")
    net = network()
    trainer = Trainer(net.parameters(), optimizer, {"learning_rate": 0.01}, kvstore=store, share_weights=share)
    for step in range(steps):
        backward(net, store.rank, step)
        trainer.step()
    return net, trainer, store


def backward(net, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    net.zero_grad()
    net(torch.randn(8, 300, generator=generator)).square().mean().backward()


def digest(net):
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    return hashlib.sha256(bits).hexdigest()[:16]


def shows(trainer):
    """Which parameters show the memory of servers."""
    return [version is not None for version in trainer._model.shared._versions]


def same():
    """The same weights, to the bit, as with weights that are copied; large parameters are shown."""
    for optimizer in ("sgd", "adam"):
        shared, trainer, store = trained(True, optimizer=optimizer)
        copied, _, other = trained(False, optimizer=optimizer)
        assert digest(shared) == digest(copied)
        print(f"digest {optimizer} {digest(shared)}", flush=True)
        print(f"shown {shows(trainer)}", flush=True)
        store.barrier()
        assert digest(shared) == digest(copied)
        other.close()
    return store


def changed():
    """A change in place is an error at the next step, and is everybody's after `broadcast_parameters`."""
    net, trainer, store = trained(True)
    with torch.no_grad():
        net[2].weight[3] += 1
    backward(net, store.rank, 50)
    try:
        trainer.step()
    except RuntimeError as error:
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError("a change was not noticed")
    try:
        trainer.step()
    except RuntimeError:
        pass
    else:
        raise AssertionError("a change was forgotten")
    expected = digest(net)
    trainer.broadcast_parameters()
    assert digest(net) == expected
    other = network()
    net.load_state_dict(other.state_dict())
    trainer.broadcast_parameters()
    assert digest(net) == digest(other)
    plain = Trainer(other.parameters(), "adam", {"learning_rate": 0.01}, kvstore=kv.create("dist"))
    plain.broadcast_parameters()
    for step in range(4):
        for one, by in ((net, trainer), (other, plain)):
            backward(one, store.rank, step)
            by.step()
    # The two optimizers differ in what they remember, so only that training goes on, alike everywhere, is compared.
    print(f"digest changed {digest(net)} {digest(other)}", flush=True)
    return store


def graphs():
    """A graph through older weights cannot be used any more."""
    net, trainer, store = trained(True)
    old = net(torch.ones(2, 300)).sum()
    backward(net, store.rank, 9)
    trainer.step()
    try:
        old.backward()
    except RuntimeError as error:
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError("a gradient at weights that are gone")
    return store


def leaving():
    """Weights stay what they were when their worker has left and the others have trained on."""
    net, trainer, store = trained(True)
    expected = digest(net)
    done = os.open(sys.argv[2], os.O_RDWR)  # a pipe with a name: read and write, so that it never ends
    if store.rank == 0:
        workers_left = store.num_workers - 1
        store.close()
        assert digest(net) == expected
        while workers_left:
            workers_left -= len(os.read(done, workers_left))
        assert digest(net) == expected
    else:
        for step in range(20):
            backward(net, store.rank, step)
            trainer.step()
        assert digest(net) != expected
        os.write(done, b".")
    print("kept", flush=True)
    return store


if __name__ == "__main__":
    globals()[sys.argv[1]]().close()
