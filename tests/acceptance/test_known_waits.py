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
from tests.acceptance.together import Together, folder

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


def rows(store: KVStore) -> Call:
    store.init("rows", RowSparse(np.zeros(0, np.int64), np.zeros((0, 4), np.float32), (10, 4)))

    def call() -> None:
        store.push("rows", RowSparse(np.array([store.rank]), np.ones((1, 4), np.float32), (10, 4)))
        store.row_sparse_pull("rows", row_ids=np.arange(2))

    return call


def trained(call: Callable[[Trainer, Call], Any], before: int = 0, **options: Any) -> Callable[[KVStore], Call]:
    """A call of a trainer that has begun, and made some steps; it is given another one."""

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


def ahead(trainer: Trainer, step: Call) -> None:
    for _ in range(4):
        step()


def joined(trainer: Trainer, step: Call) -> None:
    with trainer.join():
        step()


def saved(trainer: Trainer, step: Call) -> None:
    trainer.save_checkpoint(own_folder(trainer.kvstore) / "run", 1).result()


CALLS: dict[str, tuple[Any, Callable[[KVStore], Call]]] = {
    "init": (None, bare(lambda store: store.init("w", ones()))),
    "agree": (None, bare(lambda store: store.agree("the same"))),
    "barrier": (None, bare(lambda store: store.barrier())),
    "average": (None, bare(lambda store: store.average(1.0))),
    "from_rank_0": (None, bare(lambda store: store.from_rank_0([ones()]))),
    "pull": (None, keyed(lambda store: [store.push("w", ones()), store.pull("w")])),
    "pull_async": (None, keyed(lambda store: [store.push("w", ones()), store.pull_async("w").result()])),
    "push_async": (None, keyed(lambda store: store.push_async("w", ones()).result())),
    "pushpull": (None, keyed(lambda store: store.pushpull("w", ones()))),
    "pushpull_async": (None, keyed(lambda store: store.pushpull_async("w", ones()).exception())),
    "broadcast": (None, bare(lambda store: store.broadcast("b", ones(), ones()))),
    "row_sparse_pull": (None, rows),
    "save_checkpoint": (None, updating(lambda store, path: store.save_checkpoint(path, 1).result())),
    "load_checkpoint": (None, updating(lambda store, path: store.load_checkpoint(path), saves=True)),
    "save_optimizer_states": (None, updating(lambda store, path: store.save_optimizer_states(path))),
    "step": (None, trained(lambda trainer, step: step())),
    "step with overlap": (None, trained(lambda trainer, step: step(), before=1, overlap=True)),
    "step within join": (None, trained(joined)),
    "broadcast_parameters": (None, trained(lambda trainer, step: trainer.broadcast_parameters())),
    "save_checkpoint of a trainer": (None, trained(saved, before=1)),
    "batches": (None, queued),
    "exchange of local steps": (kvdist.local_sgd(3), trained(exchanged)),
    "exchange of fragments": (kvdist.diloco(2, fragments=1), trained(exchanged)),
    "exchange under a quota": (kvdist.quota(64), trained(exchanged)),
    "step under an exact quota": (kvdist.quota(8, exact=True), trained(exact)),
    "ssp": (kvdist.ssp(1), trained(ahead)),
}

STAY = {
    "close": "only of the last store of a process, see test_waits",
    "set_optimizer": "one worker's word is enough",
    **dict.fromkeys(("empty", "is_capable", "num_dead_nodes", "set_gradient_compression"), "asks nobody"),
    **dict.fromkeys(("on_membership_change", "on_rollback", "set_updater"), "notes a function"),
    **dict.fromkeys(("expect_rows", "leave_uncompressed", "leave_unkept"), "notes keys"),
    **dict.fromkeys(("optimizer_states", "send_command_to_servers"), "servers answer at once"),
    **dict.fromkeys(("push",), "returns before; that it waits for room is in test_waits"),
}
"""Calls of a store that wait for no other worker, and why."""
LIKE = {
    "load_optimizer_states": "load_checkpoint",
    "pushpull_clipped": "pushpull",
    "pushpull_shared": "pushpull",
    "replace_optimizer_states": "barrier",
    "row_sparse_pull_async": "row_sparse_pull",
}
"""Calls that wait as others do, in the same lines."""


def test_no_call_of_a_store_is_left_out() -> None:
    public = {name for name in vars(KVStore) if not name.startswith("_") and callable(getattr(KVStore, name))}
    assert public == {name for name in CALLS if name in public} | STAY.keys() | LIKE.keys()
    assert {*LIKE.values()} <= CALLS.keys()


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
