"""Workers of which some are lost while the others go on: ``survival.py SCENARIO [ARGUMENT…]``.

Every push is a power of two that nobody else pushes, so each element of a weight says whose pushes are in it, and no
push can be counted twice without being seen.
"""

import ast
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

from kvdist import LazyRows, RowSparse, kv

STEPS = 16
"""Of all workers; three of them fit into the 53 bits of a float64."""
SIZES = {"small": 3, "middle": 5_000, "large": 1_200_000, "whole": 60_000}
"""One is cut over all servers, others live on one."""


def say(text):
    print(text, flush=True)


def started(mode="dist"):
    store = kv.create(mode)
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(list(SIZES), [np.zeros(size) for size in SIZES.values()])
    return store


def step_of(rank, step):
    return [np.full(size, 2.0 ** (STEPS * rank + step)) for size in SIZES.values()]


def tell_weights(store):
    tell_masks(store, store.pull(list(SIZES)))


def tell_masks(store, values):
    """Say which pushes are counted: for each worker the masks that some element has, such as 65535 for all 16."""
    found = {}
    for weights in values:
        for value in np.unique(-weights).tolist():
            for rank in range(store.num_workers):
                found.setdefault(rank, set()).add((int(value) >> (STEPS * rank)) % (1 << STEPS))
    say(f"masks { ({rank: sorted(masks) for rank, masks in found.items()}) }")


def killed(victims, at, after_s, mode="dist"):
    """Some workers are killed a while after they have begun to push in a step; the others train to the end."""
    victims, changes = ast.literal_eval(victims), []
    store = started(mode)
    store.on_membership_change(lambda before, after: changes.append((before, after)))
    names = list(SIZES)
    for step in range(STEPS):
        values = step_of(store.rank, step)
        if step == int(at):
            say(f"has summed for its host: {store._backend._cluster.node.machine.traffic.summed > 0}")
        if step == int(at) and store.rank in victims:
            threading.Timer(float(after_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
            store.push(names, values)
            time.sleep(60)
        store.pushpull(names, values)
    while len(store.members) > store.num_workers - len(victims):
        time.sleep(0.01)
    store.barrier()
    tell_weights(store)
    say(f"members {store.members}, {store.num_dead_nodes()} dead, {changes[-1][1]}")
    mean = np.zeros(2)
    store.init("mean", np.zeros(2))
    store.pushpull("mean", np.full(2, store.rank + 1.0), out=mean, average=True)
    if mode == "dist":  # without rounds there are no means
        assert (mean == -np.mean([rank + 1 for rank in store.members])).all(), mean
    values = np.full(3, float(store.rank))
    store.broadcast("small", values, values)
    assert (values == min(store.members)).all(), values
    say(f"mean over those that are there: {store.average(float(store.rank))}")
    store.close()
    say("went on to the end")


def killed_in(call, folder):
    """Worker 1 is killed while it waits for the others in a call; they go on without it, and save."""
    store, folder, main = started(), Path(folder), threading.main_thread().ident
    names = list(SIZES)
    for step in range(STEPS // 2):
        store.pushpull(names, step_of(store.rank, step))
    waits = {
        "save_checkpoint": lambda: any(folder.rglob("server-*.safetensors")),
        "close": lambda: "leave" in [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])],
    }

    def die():
        while not waits[call]():
            time.sleep(0.01)
        say(f"dies in {call}")
        os.kill(os.getpid(), signal.SIGKILL)

    if store.rank == 1:
        threading.Thread(target=die).start()
        if call == "save_checkpoint":
            store.save_checkpoint(folder, 1).result()
        for step in (STEPS // 2, STEPS // 2 + 1):
            store.push(names, step_of(store.rank, step))
        store.close()
    while len(store.members) == store.num_workers:
        time.sleep(0.01)
    store.save_checkpoint(folder, 1).result()
    before = store.pull(names)
    for step in range(STEPS // 2, STEPS):
        store.pushpull(names, step_of(store.rank, step))
    tell_weights(store)
    store.barrier()
    store.load_checkpoint(folder)
    assert all((one == other).all() for one, other in zip(store.pull(names), before, strict=True))
    store.close()
    say("went on to the end")


def server_of(rank):
    """The process id of a server of this job, which this worker's launcher has started, too."""
    for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            if "DMLC_ROLE=server" in variables and f"KVDIST_RANK={rank}" in variables:
                return pid
    raise ProcessLookupError(f"server-{rank}")


def without_server(rank, at, after_s, mode, folder):
    """A server is killed a while after a step has begun; all go on with the copy that another one has."""
    store = started(mode)
    store.init("rows", LazyRows((9_000, 2), np.float64))
    names, rows = list(SIZES), np.arange(0, 9_000, 3)
    for step in range(STEPS):
        values = step_of(store.rank, step)
        if step == int(at) and store.rank == 0:
            threading.Timer(float(after_s), os.kill, (server_of(int(rank)), signal.SIGKILL)).start()
        store.pushpull(names, values)
        store.push("rows", RowSparse(rows, np.full((len(rows), 2), 2.0 ** (STEPS * store.rank + step)), (9_000, 2)))
        time.sleep(0.01)
    store.barrier()
    tell_masks(store, [*store.pull(names), store.row_sparse_pull("rows", row_ids=rows).values])
    store.init("later", np.zeros(60_000))
    store.pushpull("later", np.ones(60_000), out=(later := np.zeros(60_000)))
    store.barrier()
    assert (store.pull("later") == -store.num_workers).all()
    if mode == "dist":
        assert (later == -store.num_workers).all()
    store.save_checkpoint(Path(folder) / "saved", 1).result()
    store.pushpull("later", np.ones(60_000))
    store.barrier()
    store.load_checkpoint(Path(folder) / "saved")
    assert (store.pull("later") == -store.num_workers).all()
    store.close()
    say("went on to the end")


def joins(victims, at, times, go="", death="killed"):
    """Some workers are killed, once or again and again, and join the others each time they are started again.

    All wait for the file ``go`` before they meet at the end. Who stands still instead pushes on when it wakes up.
    """
    victims, at, life = ast.literal_eval(victims), int(at), int(os.environ.get("KVDIST_RESTARTS", "0"))
    store = started()
    names, begun = list(SIZES), 0
    if life:
        outs = [np.zeros(size) for size in SIZES.values()]
        store.pushpull(names, [np.zeros(size) for size in SIZES.values()], out=outs)
        elder = min(set(range(store.num_workers)) - set(victims))
        masks = {(int(-value) >> (STEPS * elder)) % (1 << STEPS) for out in outs for value in np.unique(out).tolist()}
        assert len(masks) == 1, f"worker-{elder} is counted differently in different elements: {masks}"
        begun = masks.pop().bit_length()  # as many rounds have been closed
        say(f"life {life} has joined in step {begun - 1}")
    for step in range(begun, STEPS):
        if store.rank in victims and life < int(times) and step >= at + 2 * life:
            if death == "killed":
                threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
            store.push(names, step_of(store.rank, step))
            if death == "killed":
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGSTOP)
            step += 1
        while store.rank not in victims and step > at and len(store.members) < store.num_workers:
            time.sleep(0.01)
        store.pushpull(names, step_of(store.rank, step))
    while go and not Path(go).exists():
        time.sleep(0.01)
    store.barrier()
    tell_weights(store)
    store.close()
    say("went on to the end")


def rows(victims, at, after_s):
    """Some workers are killed while all push rows of a table."""
    store = kv.create("dist")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("table", LazyRows((90_000, 4), np.float64))
    ids = np.arange(0, 90_000, 3)
    for step in range(STEPS):
        if step == int(at) and store.rank in ast.literal_eval(victims):
            threading.Timer(float(after_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
        value = np.full((len(ids), 4), 2.0 ** (STEPS * store.rank + step))
        store.push("table", RowSparse(ids, value, (90_000, 4)))
        found = store.row_sparse_pull("table", row_ids=ids)
        if step == int(at) and store.rank in ast.literal_eval(victims):
            time.sleep(60)
    tell_masks(store, [found.values])
    say("went on to the end")


def ends(way):
    """Worker 1 ends by itself in the middle."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank == 1 and step == 5:
            WAYS[way]()
        store.pushpull(names, step_of(store.rank, step))
    tell_weights(store)
    say("went on to the end")


def interrupt():
    raise KeyboardInterrupt


WAYS = {
    "exits": lambda: sys.exit(3),
    "is interrupted": interrupt,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def cut_off(folder):
    """All push while worker 1 is cut off from another process."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if step == 3:
            say("waits for the cut")
            while not os.path.exists(os.path.join(folder, "cut")):
                time.sleep(0.01)
        store.pushpull(names, step_of(store.rank, step))
        time.sleep(0.3)
    while store.num_dead_nodes() == 0:
        time.sleep(0.01)
    tell_weights(store)
    store.close()
    say("went on to the end")


def forgotten():
    """All but worker 0 are killed one after the other while they read weights in the servers' memory."""
    store = kv.create("dist")
    store.set_optimizer("sgd", learning_rate=1.0)
    if store.rank == 0:
        pause("begins")
    store.init("w", np.zeros(MEGABYTES << 17))
    ones, out = np.ones(MEGABYTES << 17), np.zeros(MEGABYTES << 17)
    for step in range(1, store.num_workers):
        (shown,) = store.pushpull_shared("w", ones, out)
        assert shown is not None, "it is read where it lies"
        if step == store.rank:
            os.kill(os.getpid(), signal.SIGKILL)
    while len(store.members) > 1:
        time.sleep(0.01)
    store.pushpull_shared("w", ones, out)
    pause("is alone")
    say("went on to the end")


MEGABYTES = 8


def pause(text):
    say(text)
    with open(os.environ["FIFO"], "rb") as words:
        words.read()


def reads_nothing(seconds, how):
    """Worker 1 has asked for weights, and looks at nothing for longer than the patience, perhaps no thread of it."""
    store = started("dist_async")
    names = list(SIZES)
    for step in range(STEPS):
        future = store.pushpull_async(names, step_of(store.rank, step))
        if store.rank == 1 and step == 3:
            sleep = time.sleep if how == "sleeps" else ctypes.PyDLL(None).sleep  # which keeps the GIL
            sleep(int(seconds))
        future.result()
    say(f"{store.num_dead_nodes()} dead")
    store.barrier()
    tell_weights(store)
    say("went on to the end")


def raises(ranks):
    """Some workers have the same bug, one after the other."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank in ast.literal_eval(ranks) and step == 2 + store.rank:
            raise RuntimeError("this script is wrong")
        store.pushpull(names, step_of(store.rank, step))
        time.sleep(0.05)
    say("went on to the end")


def stopped():
    """Worker 1 stands still for longer than the patience; it wakes up as a zombie."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank == 1 and step == 3:
            say("stands still")
            os.kill(os.getpid(), signal.SIGSTOP)
        store.pushpull(names, step_of(store.rank, step))
    tell_weights(store)
    while store.num_dead_nodes() == 0:
        time.sleep(0.01)
    pause("goes on without it")
    store.pull("small")
    store.close()
    say("went on to the end")


def stopped_for_good():
    """Worker 1 stands still, and nobody wakes it up."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        store.pushpull(names, step_of(store.rank, step))
    tell_weights(store)
    store.close()
    say("went on to the end")


def away(folder):
    """The scheduler is killed halfway. Pushes go on; a barrier, a new key and a checkpoint wait for its return."""
    store = started()
    names, folder = list(SIZES), Path(folder)
    store.save_checkpoint(folder, 0)
    for step in range(STEPS // 2):
        store.pushpull(names, step_of(store.rank, step))
    say("halfway")
    while not (folder / "killed").exists():
        time.sleep(0.01)
    for step in range(STEPS // 2, STEPS):
        store.pushpull(names, step_of(store.rank, step))
    say("pushed to the end without a scheduler")
    store.barrier()
    store.init("late", np.full(3, 7.0))
    store.save_checkpoint(folder, 1)
    tell_weights(store)
    say(f"late {store.pull('late').tolist()}, steps {sorted(path.name for path in folder.glob('step-*'))}")
    store.close()
    say("went on to the end")


def only_sums():
    """A store without an optimizer cannot go on without a worker."""
    store = kv.create("dist")
    store.init("w", np.zeros(3))
    store.push("w", np.ones(3))


def updates_here():
    """Nor can a trainer whose workers update."""
    import torch

    from kvdist import Trainer

    weight = torch.nn.Parameter(torch.zeros(4))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="dist", update_on_kvstore=False)
    weight.sum().backward()
    trainer.step()


def without_servers():
    """Nor can a store that sums among workers."""
    kv.create("collective")


def clips():
    """Nor can servers that clip by a norm."""
    store = started()
    store.pushpull_clipped("small", np.ones(3), out=np.ones(3), clip_norm=1.0)


def comes_late(back):
    """Worker 1 is killed, and started again when the others are about to finish."""
    if "KVDIST_RESTARTS" in os.environ:
        with open(back, "w"):
            time.sleep(60)
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        store.pushpull(names, step_of(store.rank, step))
    while not os.path.exists(back):
        time.sleep(0.01)
    tell_weights(store)
    store.close()


def at_work(logs):
    """Worker 1 is killed in each of four lives, when the launcher has heard that it has made a step."""
    life = int(os.environ.get("KVDIST_RESTARTS", "0"))
    store, log = kv.create("dist"), Path(logs) / "scheduler.log"
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", np.zeros(3))
    heard = f"at work worker {store.rank} life {life}\n"
    while life < 4 and not (store.rank == 1 and heard in log.read_text()):
        if (Path(logs) / "over").exists():
            break
        store.pushpull("w", np.ones(3))
        time.sleep(0.01)
    if life < 4 and store.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (Path(logs) / "over").touch()
    store.close()


def too_few(folder):
    """Worker 1 is killed; worker 0 makes no more steps than one or two before it is back, and they end together."""
    import torch

    from kvdist import Trainer

    store, weight = kv.create("dist"), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
    is_back = "KVDIST_RESTARTS" in os.environ
    step = trainer.version
    if is_back:
        say(f"is back at version {step}")
    while step < 100:
        if store.rank == 1 and step == 3 and not is_back:
            os.kill(os.getpid(), signal.SIGKILL)
        weight.grad = torch.full_like(weight, 1.0)
        trainer.step()
        step += 1
    say(f"ended at version {trainer.version}")
    store.close()


def another_model(folder, sizes):
    """Worker 1 is killed, and started again with another model; the others make steps until that was refused."""
    import torch

    from kvdist import InitMismatch, Trainer

    store, refused = kv.create("dist"), Path(folder) / "refused"
    is_back = "KVDIST_RESTARTS" in os.environ
    shapes = ast.literal_eval(sizes) if is_back else (3, 5)
    weights = [torch.nn.Parameter(torch.full((size,), 7.0 if is_back else 0.0)) for size in shapes]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store)
    after = 0
    try:
        while after < 5:
            if store.rank == 1 and trainer.version == 3 and not is_back:
                os.kill(os.getpid(), signal.SIGKILL)
            for weight in weights:
                weight.grad = torch.full_like(weight, 1000.0 if is_back else 1.0)
            trainer.step()
            after += refused.exists()
    except InitMismatch:
        refused.touch()
        raise
    held = [store.pull(key) for key in range(2)]
    assert all((weight == -trainer.version).all() for weight in [*weights, *held]), (trainer.version, weights, held)
    say("went on to the end, with the weights of all steps and of nothing else")
    store.close()


def first_mean(folder):
    """Worker 0 comes back, and is a member before worker 1 makes the first mean, of the steps that it has missed."""
    import torch

    from kvdist import Trainer

    back, averaged = Path(folder) / "back", Path(folder) / "averaged"
    store, weight = kv.create("dist"), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
    is_back = "KVDIST_RESTARTS" in os.environ
    if is_back:
        back.touch()
    step = trainer.version
    while is_back and not averaged.exists():
        time.sleep(0.01)
    while step < STEPS:
        if store.rank == 0 and step == 2 and not is_back:
            os.kill(os.getpid(), signal.SIGKILL)
        if store.rank == 1 and step == 5:
            while not back.exists() or len(store.members) < 2:
                time.sleep(0.01)
            say(f"first mean {store.average(7.0)}")
            averaged.touch()
        weight.grad = torch.full_like(weight, 1.0)
        trainer.step()
        step += 1
    say(f"next mean {store.average(float(store.rank))} at version {trainer.version}")
    store.close()


def trains_on(folder=None):
    """Workers that note what becomes of the scheduler only by what they agree on. Halfway they may wait for a file."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if folder and step == STEPS // 2:
            say("halfway")
            while not os.path.exists(os.path.join(folder, "cut")):
                time.sleep(0.01)
        store.pushpull(names, step_of(store.rank, step))
        say(f"step {step}")
        time.sleep(0.1)
    store.barrier()
    tell_weights(store)
    store.close()


def servers_come_back(folder, stages, mode):
    """Workers that train on while servers are killed and come back, stage after stage, until they are told so."""
    store = started(mode)
    store.init("stage", np.zeros(2))
    store.init("rows", LazyRows((9_000, 2), np.float64))
    names, ids, stages = list(SIZES), np.arange(0, 9_000, 1_000), int(stages)
    for step in range(STEPS):
        stage = step // 4 if step % 4 == 2 and step // 4 < stages else None
        if stage is not None:
            say(f"stage {stage}")
        told, idle = np.zeros(2), 0
        while stage is not None and told[0] > -stage - 1:
            is_first = store.rank == 0 and Path(folder, f"filled-{stage}").exists()
            is_told = is_first and -told[0] < stage + 1
            store.pushpull("stage", np.full(2, float(is_told)), out=told)
            idle += 1
            time.sleep(0.01)
        if stage is not None:
            say(f"trained on for {idle} rounds")
        store.push("rows", RowSparse(ids, np.full((len(ids), 2), 2.0 ** (STEPS * store.rank + step)), (9_000, 2)))
        store.pushpull(names, step_of(store.rank, step))
    store.barrier()
    tell_masks(store, [*store.pull(names), store.row_sparse_pull("rows", row_ids=ids).values])
    store.barrier()
    store.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
