"""Each call that waits for other workers is known to wait: to hints, the search for deadlocks, and the stall limit.

One worker makes a call in a thread while the other stands still; the thread must be among those that wait. Then the
other makes the same call, and both go on.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import kvdist
from kvdist import QueueSampler, RowSparse, Trainer, kv
from kvdist.kvstore.base import KVStore
from kvdist.runtime import waits
from kvdist.training.embedding import Embedding
from tests.acceptance.together import Together, folder
from tests.cases import each

two = Together(2, 1, KVDIST_CHECKPOINT_ROOT="/")
PATIENCE_S = 60.0
Call = Callable[[], Any]


def own_folder(store: Any) -> Path:
    """A folder of this store."""
    return folder(f"waits-{store._backend._number}")


def ones() -> np.ndarray:
    return np.ones(4, np.float32)


def keyed(call: Callable[[KVStore], Any]) -> Callable[[KVStore], Call]:
    """A call of a store that has a key."""

    def prepare(store: KVStore) -> Call:
        store.init("w", ones())
        return lambda: call(store)

    return prepare


def bare(call: Callable[[KVStore], Any]) -> Callable[[KVStore], Call]:
    """A call of a store that has none."""
    return lambda store: lambda: call(store)


def updating(call: Callable[[KVStore, str], Any], saves: bool = False) -> Callable[[KVStore], Call]:
    """A call of a store that updates, with a folder; which has a checkpoint if `saves`."""

    def prepare(store: KVStore) -> Call:
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("w", ones())
        store.pushpull("w", ones())
        path = str(own_folder(store) / "run")
        if saves:
            store.save_checkpoint(path, 1).result()
        return lambda: call(store, path)

    return prepare


def rows(call: Callable[[KVStore], Any]) -> Callable[[KVStore], Call]:
    """A call of a store that has a table to which this worker pushes before."""

    def prepare(store: KVStore) -> Call:
        store.init("rows", RowSparse(np.zeros(0, np.int64), np.zeros((0, 4), np.float32), (10, 4)))
        pushed = RowSparse(np.array([store.rank]), np.ones((1, 4), np.float32), (10, 4))
        return lambda: [store.push("rows", pushed), call(store)]

    return prepare


def trained(
    call: Callable[[Trainer, Call], Any],
    before: int = 0,
    first: Callable[[Trainer, Call], Any] | None = None,
    **options: Any,
) -> Callable[[KVStore], Call]:
    """A call of a trainer that has begun, made some steps, and then perhaps another call; it is given another step."""

    def prepare(store: KVStore) -> Call:
        weight = nn.Parameter(torch.zeros(4))
        own = {} if "optimizer" in options else {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1}}
        trainer = Trainer([("w", weight)], **own, kvstore=store, **options)

        def step(samples: int | None = None) -> None:
            weight.grad = None
            weight.sum().backward()
            trainer.step(samples=samples)

        trainer.broadcast_parameters()
        for _ in range(before):
            step()
        if first is not None:
            first(trainer, step)
        return lambda: call(trainer, step)

    return prepare


def queued(store: KVStore) -> Call:
    """Worker 1 has the only batch."""
    weight = nn.Parameter(torch.zeros(4))
    trainer = Trainer([("w", weight)], "sgd", {"learning_rate": 0.1}, kvstore=store)
    trainer.broadcast_parameters()
    loader = torch.utils.data.DataLoader(range(4), 4, sampler=QueueSampler(4))
    batches = iter(trainer.batches(loader))
    first = [next(batches)] if store.rank == 1 else []
    store.barrier()

    def call() -> None:
        for _ in (*first, *batches) if store.rank == 0 else first:
            weight.grad = None
            weight.sum().backward()
            trainer.step()
        assert not list(batches)

    return call


def exchanged(trainer: Trainer, step: Callable[[int], None]) -> None:
    step(8)
    trainer.exchange()


def exact(trainer: Trainer, step: Callable[[int], None]) -> None:
    for _ in range(3):
        step(8)
    trainer.exchange()


def joined(trainer: Trainer, step: Call) -> None:
    with trainer.join():
        step()


def saved(trainer: Trainer, step: Call) -> None:
    trainer.save_checkpoint(own_folder(trainer.kvstore) / "run", 1).result()


def resumed(trainer: Trainer, step: Call) -> None:
    trainer.load_checkpoint(own_folder(trainer.kvstore) / "run")


def kept(trainer: Trainer, step: Call) -> None:
    trainer.save_states(own_folder(trainer.kvstore) / "states")


def given_back(trainer: Trainer, step: Call) -> None:
    trainer.load_states(own_folder(trainer.kvstore) / "states")


def summed(store: KVStore) -> Call:
    weight = nn.Parameter(torch.zeros(4))
    trainer = Trainer([("w", weight)], "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=False)
    trainer.broadcast_parameters()
    weight.sum().backward()

    def call() -> None:
        trainer.allreduce_grads()
        trainer.update(1)

    return call


def embedded(store: KVStore) -> Call:
    store.set_optimizer("sgd", learning_rate=0.1)
    layer = Embedding(10, 4, store)

    def call() -> None:
        layer(torch.tensor([store.rank, 5])).sum().backward()
        layer.step()
        layer(torch.tensor([5]))

    return call


CALLS: dict[str, tuple[Any, Callable[[KVStore], Call]]] = {
    "KVStore.init": (None, bare(lambda store: store.init("w", ones()))),
    "KVStore.agree": (None, bare(lambda store: store.agree("the same"))),
    "KVStore.barrier": (None, bare(lambda store: store.barrier())),
    "KVStore.average": (None, bare(lambda store: store.average(1.0))),
    "KVStore.from_rank_0": (None, bare(lambda store: store.from_rank_0([ones()]))),
    "KVStore.pull": (None, keyed(lambda store: [store.push("w", ones()), store.pull("w")])),
    "KVStore.pull_async": (None, keyed(lambda store: [store.push("w", ones()), store.pull_async("w").result()])),
    "KVStore.push_async": (None, keyed(lambda store: store.push_async("w", ones()).result())),
    "KVStore.pushpull": (None, keyed(lambda store: store.pushpull("w", ones()))),
    "KVStore.pushpull_async": (None, keyed(lambda store: store.pushpull_async("w", ones()).exception())),
    "KVStore.pushpull_clipped": (None, updating(lambda store, path: store.pushpull_clipped("w", ones(), 1.0))),
    "KVStore.pushpull_shared": (None, keyed(lambda store: store.pushpull_shared("w", ones(), ones()))),
    "KVStore.broadcast": (None, bare(lambda store: store.broadcast("b", ones(), ones()))),
    "KVStore.row_sparse_pull": (None, rows(lambda store: store.row_sparse_pull("rows", row_ids=np.arange(2)))),
    "KVStore.row_sparse_pull_async": (
        None,
        rows(lambda store: store.row_sparse_pull_async("rows", row_ids=np.arange(2)).result()),
    ),
    "KVStore.save_checkpoint": (None, updating(lambda store, path: store.save_checkpoint(path, 1).result())),
    "KVStore.load_checkpoint": (None, updating(lambda store, path: store.load_checkpoint(path), saves=True)),
    "KVStore.save_optimizer_states": (None, updating(lambda store, path: store.save_optimizer_states(path))),
    "KVStore.load_optimizer_states": (
        None,
        updating(lambda store, path: store.load_optimizer_states(f"{path}/step-1"), saves=True),
    ),
    "Trainer.step": (None, trained(lambda trainer, step: step())),
    "Trainer.step with overlap": (None, trained(lambda trainer, step: step(), before=1, overlap=True)),
    "Trainer.join": (None, trained(joined)),
    "Trainer.broadcast_parameters": (None, trained(lambda trainer, step: trainer.broadcast_parameters())),
    "Trainer.allreduce_grads": (None, summed),
    "Trainer.save_checkpoint": (None, trained(saved, before=1)),
    "Trainer.load_checkpoint": (None, trained(resumed, before=1, first=saved)),
    "Trainer.save_states": (None, trained(kept, before=1)),
    "Trainer.load_states": (None, trained(given_back, before=1, first=kept)),
    "Trainer.batches": (None, queued),
    "Trainer.exchange of local steps": (kvdist.local_sgd(3), trained(exchanged)),
    "Trainer.exchange of fragments": (kvdist.diloco(2, fragments=1), trained(exchanged)),
    "Trainer.exchange under a quota": (kvdist.quota(64), trained(exchanged)),
    "Trainer.step under an exact quota": (kvdist.quota(8, exact=True), trained(exact)),
    "Embedding.forward": (None, embedded),
}
STAY = {
    "KVStore": {
        "close": "only of the last store of a process, see test_waits",
        "set_optimizer": "one worker's word is enough",
        "replace_optimizer_states": "returns at once, or waits for servers",
        "push": "returns before; that it waits for room is in test_waits",
        **dict.fromkeys(("empty", "is_capable", "num_dead_nodes", "set_gradient_compression"), "asks nobody"),
        **dict.fromkeys(("on_membership_change", "on_rollback", "set_updater"), "notes a function"),
        **dict.fromkeys(("expect_rows", "leave_uncompressed", "leave_unkept"), "notes keys"),
        **dict.fromkeys(("optimizer_states", "send_command_to_servers"), "servers answer at once"),
    },
    "Trainer": {
        "close": "of its store, see above",
        "update": "works on this worker alone",
        **dict.fromkeys(("as_torch_optimizer", "no_sync", "skip_step"), "asks nobody"),
        "set_learning_rate": "travels with the next push",
    },
    "Embedding": {"extra_repr": "asks nobody", "prefetch": "returns before", "step": "is in the row of forward"},
}
"""Calls that wait for no other worker, and why."""


@each("kind", [KVStore, Trainer, Embedding])
def test_no_call_is_left_out(kind: type) -> None:
    public = {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
    waiting = {word.split()[0].partition(".")[2] for word in CALLS if word.startswith(f"{kind.__name__}.")}
    assert public == waiting | STAY[kind.__name__].keys()


@two.each(*CALLS)
def test_who_waits_for_another_worker_is_known_to_wait(word: str) -> None:
    policy, prepare = CALLS[word]
    with kv.create("dist", policy=policy) as store:
        call = prepare(store)
        store.barrier()
        seen = own_folder(store) / "seen"
        try:
            if store.rank == 1:
                until(seen.exists)
                call()
            else:
                see(call, seen)
        finally:
            store.barrier()
            if store.rank == 0:
                shutil.rmtree(seen.parent)


def see(call: Call, seen: Path) -> None:
    """Make a call in a thread, look whether that is known to wait, and let the other worker go on."""
    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: noting(call, errors), daemon=True)
    thread.start()
    try:
        until(lambda: thread.ident in dict(waits._waits) or not thread.is_alive())
        assert thread.is_alive(), f"it has not waited for the other worker: {errors}"
    finally:
        seen.touch()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not errors, errors


def noting(call: Call, errors: list[BaseException]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the test shows it
        errors.append(error)


def until(is_true: Callable[[], bool]) -> None:
    """Look until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, "it never was"
        time.sleep(0.01)
