"""Values that stay in shared memory, one scenario a function: ``shared.py SCENARIO [ARGUMENT…]``.

Every worker checks by itself. Numbers are small integers that depend on the place, the worker and the round, so sums
are exact in every dtype, and a value at the wrong place or of the wrong round is not the right one by chance.
"""

import contextlib
import gc
import hashlib
import os
import sys
from pathlib import Path

import numpy as np
from ticking import start_ticking

from kvdist import ForkError, PeerLostError, kv

SIZES = {"one": 1, "4095": 4095, "64 KiB": 16384, "a slice": 999_999, "cut": 3_000_001}
HALVES = {"float16": 100_003, "bfloat16": 70_001}
ROUNDS = 30
BIG = 1_000_003


def say(text):
    print(text, flush=True)


def wait_for(fifo):
    """Block until the test says so."""
    with open(fifo, "rb") as words:
        words.read()


def joined(store_type="dist"):
    """A store; the worker that `TCP_RANK` names does without shared memory."""
    if os.environ["KVDIST_RANK"] == os.environ.get("TCP_RANK"):
        os.environ["KVDIST_TRANSPORT"] = "tcp"
    return kv.create(store_type)


def meet_servers(store, keys):
    """Until a server has answered once, a worker does not know whether they share memory, and is shown no views."""
    store.pull(keys)


def segments_mapped(kinds=("r--s",)):
    """How many segments of peers this process has mapped, by what it may do with them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:kvdist-arena" in line and line.split()[1] in kinds for line in lines)


class Ramps:
    """Gradients: element i of worker r in round k is (i + r + k) modulo a small number."""

    def __init__(self, sizes, dtype=np.float32, modulus=16):
        self._sizes, self._modulus = sizes, modulus
        self._ramps = [(np.arange(size + modulus) % modulus).astype(dtype) for size in sizes]

    def of(self, rank, step):
        """One array for each size, not to be written."""
        begin = (rank + step) % self._modulus
        return [ramp[begin : begin + size] for ramp, size in zip(self._ramps, self._sizes, strict=True)]


class TorchRamps(Ramps):
    """The same as tensors of bfloat16."""

    def __init__(self, sizes, modulus):
        import torch

        torch.set_num_threads(1)
        super().__init__(sizes, np.float32, modulus)
        self._ramps = [torch.from_numpy(ramp).bfloat16() for ramp in self._ramps]


def resident_like(store, arrays):
    """Arrays of the store's own memory, as many and of the same kind."""
    made = []
    for array in arrays:
        if isinstance(array, np.ndarray):
            made.append(store.empty(array.shape, array.dtype))
        else:
            import torch

            made.append(torch.from_numpy(store.empty(tuple(array.shape), "float16")).view(torch.bfloat16))
    return made


def fresh_like(arrays):
    return [array.copy() if isinstance(array, np.ndarray) else array.clone() for array in arrays]


def summed(ramps, workers, step):
    """What all workers give in a round, added up."""
    return [sum(ones) for ones in zip(*(ramps.of(rank, step) for rank in range(workers)), strict=True)]


def put(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        target[...] = source


def same(values, expected):
    return all(bool((value == one).all()) for value, one in zip(values, expected, strict=True))


def exchanged(store, keys, given, resident, out, step):
    """Contribute and read the result, in another way each step; the result, and how many of it are views."""
    way = step % 7
    if way == 0:
        store.push(keys, given)
        return store.pull(keys), 0
    if way == 1:
        futures = store.push_async(keys, given), store.pull_async(keys, out)
    elif way == 2:
        put(resident, given)
        futures = store.push_async(keys, resident), store.pull_async(keys, out)
    elif way == 3:
        store.pushpull(keys, given, out)
        return out, 0
    elif way == 4:
        put(resident, given)
        store.pushpull(keys, resident)
        return resident, 0
    elif way == 5:
        put(resident, given)
        futures = (store.pushpull_async(keys, resident, out),)
    else:
        put(resident, given)
        shown = store.pushpull_shared(keys, resident if step % 2 else given, out)
        results = [one if view is None else view for view, one in zip(shown, out, strict=True)]
        return results, sum(view is not None for view in shown)
    for future in futures:
        future.result()
    return out, 0


def exact():
    """After each round every weight is the sum of all gradients so far, and a sum of integers is right by itself."""
    store, sums = joined(), joined()
    n = store.num_workers
    ramps = [
        Ramps(list(SIZES.values())),
        Ramps([HALVES["float16"]], np.float16),
        TorchRamps([HALVES["bfloat16"]], modulus=2),
    ]
    keys = [*SIZES, *HALVES]

    def gradients(rank, step):
        return [array for ramp in ramps for array in ramp.of(rank, step)]

    expected = [array * 0 for array in gradients(0, 0)]
    store.init(keys, expected)
    store.set_optimizer("test")
    resident, out = resident_like(store, expected), fresh_like(expected)
    counts = Ramps([50_000], np.int64)
    sums.init("int64", counts.of(0, 0)[0])
    views = 0
    for step in range(ROUNDS):
        for rank in range(n):
            for total, one in zip(expected, gradients(rank, step), strict=True):
                total += one
        results, shown = exchanged(store, keys, gradients(store.rank, step), resident, out, step)
        wrong = [key for key, a, b in zip(keys, results, expected, strict=True) if not same([a], [b])]
        assert not wrong, (step, wrong)
        views += shown
        (mine,) = counts.of(sums.rank, step)
        total = sum(counts.of(rank, step)[0] for rank in range(n))
        (result,), _ = exchanged(sums, ["int64"], [mine], resident_like(sums, [mine]), fresh_like([mine]), step)
        assert (result == total).all(), step
    say(f"rank {store.rank} mapped {segments_mapped()} segments and was shown {views} views")
    sums.close()
    return store


def trained():
    """Random gradients, whose sum depends on the order of its terms, and Adam: what all workers print is the same."""
    store = joined()
    sizes = [1, 4095, 16384, 999_999, 1_200_007]
    random = np.random.default_rng(store.rank)
    keys = list(range(len(sizes)))
    out = [np.zeros(size, np.float32) for size in sizes]
    store.init(keys, out)
    store.set_optimizer("adam", learning_rate=0.01)
    resident, digest = resident_like(store, out), hashlib.sha256()
    for step in range(14):
        given = [random.standard_normal(size, np.float32) for size in sizes]
        results, _ = exchanged(store, keys, given, resident, out, step)
        for one in results:
            digest.update(one.tobytes())
    say(f"digest {digest.hexdigest()}")
    return store


def callers_memory():
    """What was pushed is what the array held when the call returned, or until its future resolved."""
    store = joined()
    keys, sizes = ["small", "64 KiB", "cut"], [3, 16384, 2_500_001]
    ramps = Ramps(sizes)
    expected = [array * 0 for array in ramps.of(0, 0)]
    store.init(keys, expected)
    store.set_optimizer("test")
    plain, resident = fresh_like(expected), resident_like(store, expected)
    for step in range(12):
        for rank in range(store.num_workers):
            for total, one in zip(expected, ramps.of(rank, step), strict=True):
                total += one
        arrays = plain if step % 3 == 0 else resident
        put(arrays, ramps.of(store.rank, step))
        if step % 3 == 2:
            store.push_async(keys, arrays).result()
        elif step % 2:
            store.push(keys, arrays)
        else:
            for key, array in zip(keys, arrays, strict=True):
                store.push(key, array)
                array.fill(777)
        for array in arrays:
            array.fill(777)
        assert same(store.pull(keys), expected), step
        assert all((array == 777).all() for array in arrays), "nobody writes to what was only pushed"
        if step % 4 == 3:
            # Several pushes of one resident array under way, changed after each.
            for again in range(3):
                put(resident, ramps.of(store.rank, step + again))
                store.push(keys, resident)
                for rank in range(store.num_workers):
                    for total, one in zip(expected, ramps.of(rank, step + again), strict=True):
                        total += one
            put(resident, [one * 0 + 555 for one in resident])
            assert same(store.pull(keys), expected), step
    return store


def views():
    """A view is right, and stays as it is until the next `pushpull_shared` of its key, whatever else happens."""
    store = joined()
    keys = ["small", "a", "cut"]
    ramps = Ramps([5, 300_000, 2_000_003])
    out = fresh_like(ramps.of(0, 0))
    n = store.num_workers
    store.init(keys, [array * 0 for array in out])
    meet_servers(store, keys)
    held = []
    for step in range(ROUNDS):
        mine, total = ramps.of(store.rank, step), summed(ramps, n, step)
        shown = store.pushpull_shared(keys, mine, out)
        assert shown[0] is None, "small values are copied"
        assert shown[1] is not None and shown[1].shape == (300_000,) and shown[1].dtype == np.float32
        now = [one if view is None else view for view, one in zip(shown, out, strict=True)]
        assert same(now, total), step
        for other in range(step % 4):  # other rounds of the same keys
            store.push(keys, [one * (other + 2) for one in mine])
            if other % 2:
                store.pull(keys)
        store.barrier()
        assert same(now, total), f"the views of step {step} have changed"
        held = [*held[-3:], now]  # old ones may be kept and read, and mean nothing
        assert all(np.isfinite(one.sum()) for results in held for one in results)
        store.pull(keys)
        store.barrier()
    return store


def views_out_of_step():
    """Out of step, the others make many versions while a worker reads the one that it was shown."""
    store = joined("dist_async")
    value = np.ones(BIG, np.float32)
    store.init("w", value * 0)
    meet_servers(store, "w")
    store.set_optimizer("test")
    seen = np.zeros(BIG, np.float32)
    for _ in range(4):
        (view,) = store.pushpull_shared(["w"], [value], [np.empty_like(value)])
        assert view is not None
        before = view.copy()
        assert (before > seen).all(), "a later version"
        store.barrier()
        if store.rank:
            for _ in range(10):
                store.pushpull("w", value, np.empty_like(value))
        store.barrier()
        assert (view == before).all(), "it was written while it was read"
        seen = before
    store.barrier()
    n = store.num_workers
    assert (store.pull("w") == 4 * (n + 10 * (n - 1))).all()
    return store


def endless(way):
    """Large rounds without an end, each checked; who loses somebody lets go of everything and says what is left."""
    store = joined("dist_async" if way == "async" else "dist")
    ramps = Ramps([4095, BIG, 2_000_003])
    keys, n = ["small", "a", "cut"], store.num_workers
    given = ramps.of(store.rank, 0)
    store.init(keys, [one * 0 for one in given])
    if way == "async":
        store.set_optimizer("test")
    resident, out = resident_like(store, given), fresh_like(given)
    total = summed(ramps, n, 0)
    put(resident, given)
    start_ticking()
    say("going")
    try:
        for step in range(10**9):
            if way == "async":
                store.pushpull(keys, resident, out)
                assert all((one == one.astype(np.int64)).all() for one in out), "wrong"
            else:
                put(resident, given)
                results, _ = exchanged(store, keys, given, resident, out, step)
                assert same(results, total), "wrong"
    except PeerLostError as error:
        say(f"lost {error.node!r}: {error}")
        resident = results = None
        raise


def leaves(how):
    """Worker 1 leaves with a push under way, which counts; the others go on with exact numbers."""
    store = joined("dist_async" if how == "async" else "dist")
    sizes = [3, 16384, BIG]
    keys, n = list(range(3)), store.num_workers
    ones = [np.ones(size, np.float32) for size in sizes]
    store.init(keys, [one * 0 for one in ones])
    store.set_optimizer("test")
    resident, out = resident_like(store, ones), fresh_like(ones)
    put(resident, ones)
    for _ in range(5):
        store.pushpull_shared(keys, resident, out)
    if store.rank == 1:
        store.push_async(keys, resident)
        store.push(keys, ones)
        store.close()
        say("left")
        sys.exit(0)  # its memory goes with it
    for _ in range(2):
        store.push(keys, resident)
    for _ in range(20):
        store.pushpull_shared(keys, resident, out)
    store.barrier()
    total = 7 * n + 20 * (n - 1)
    assert all((one == total).all() for one in store.pull(keys)), [one[0] for one in store.pull(keys)]
    return store


def paced(store_type, flag):
    """Rounds until a file is there; then what everybody has counted is in the value."""
    store = joined(store_type)
    n = store.num_workers
    value = store.empty(SIZES["a slice"])
    counts = np.zeros(n, np.float32)
    store.init(["w", "counts"], [value * 0, counts])
    store.set_optimizer("test")
    value[...] = store.rank + 1
    out, own = np.zeros(SIZES["a slice"], np.float32), np.zeros(n, np.float32)
    own[store.rank] = 1
    rounds = 0
    store.barrier()
    # In step, all have to stop after the same round: worker 0 says so to all, and its word is one round old.
    is_last = False
    while not is_last:
        word = np.float32(1000 if os.path.exists(flag) and store.rank == 0 and store_type == "dist" else 1)
        store.pushpull(["w", "counts"], [value, own * word], [out, counts])
        rounds += 1
        assert (out == out[0]).all(), "a version is a whole one"
        if store_type == "dist":
            is_last = counts[0] >= 1000
            assert out[0] == rounds * n * (n + 1) // 2, (out[0], rounds)
        else:
            is_last = os.path.exists(flag)
        if rounds % 5 == 0:
            say(f"worker {store.rank} round {rounds}")
    store.barrier()
    out, counts = store.pull(["w", "counts"])
    if store_type != "dist":
        assert (out == sum((rank + 1) * counts[rank] for rank in range(n))).all(), (out[0], counts)
    assert rounds == counts[store.rank] or store_type == "dist", (rounds, counts)
    return store


def steady(way, fifo, first, last):
    """Steps of 20 MB, and stops at two of them until the test has looked at the memory of all processes."""
    store = joined()
    keys, elements = list(range(5)), 1 << 20
    ones = [np.ones(elements, np.float32) for _ in keys]
    store.init(keys, ones)
    meet_servers(store, keys)
    out, resident = fresh_like(ones), resident_like(store, ones)
    random = np.random.default_rng(7)  # the same lists on all workers
    for step in range(1, int(last) + 1):
        if way == "lists":
            order = [int(key) for key in random.permutation(5)]
            cut = 1 + step % 4
            for part in (order[:cut], order[cut:]):
                store.push(part, ones[: len(part)])
                store.pull(part, out[: len(part)])
        elif way == "made again":
            resident = [store.empty(elements + step % 3 * 1024)[:elements] for _ in keys]
            put(resident, ones)
            store.pushpull_async(keys, resident, out).result()
        else:
            shown = store.pushpull_shared(keys, resident, out)
            assert all(view is not None for view in shown)
            assert shown[step % 5][step] == out[0][0] or step
        if step in (int(first), int(last)):
            store.barrier()
            say(f"worker {store.rank} at step {step}")
            wait_for(f"{fifo}.{store.rank}")
    return store


def forks():
    """Children come and go while large values travel; the store is not theirs, and the parent's goes on exactly."""
    store = joined()
    ramps = Ramps([BIG, 2_000_003])
    keys, n = ["a", "cut"], store.num_workers
    store.init(keys, ramps.of(0, 0))
    meet_servers(store, keys)
    resident, out = resident_like(store, ramps.of(0, 0)), fresh_like(ramps.of(0, 0))
    for step in range(9):
        put(resident, ramps.of(store.rank, step))
        total = summed(ramps, n, step)
        shown = store.pushpull_shared(keys, resident, out)
        future = store.pushpull_async(keys, resident, out)
        child = os.fork()
        if child == 0:
            code = refusals(store, keys, resident, out) + read(shown)
            resident = shown = future = None
            gc.collect()
            if step % 2:
                os._exit(code)
            sys.exit(code)
        future.result()
        assert same(out, total) and same(shown, total), step
        again = store.empty(BIG)  # the child's finalizers have given nothing of the parent's away
        again.fill(-1)
        assert same(resident, ramps.of(store.rank, step)) and same(shown, total)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert same(resident, ramps.of(store.rank, step)) and same(shown, total)
    return store


def refusals(store, keys, given, out):
    """How many calls a forked child is not refused."""
    calls = (
        lambda: store.push(keys, given),
        lambda: store.push_async(keys, given),
        lambda: store.pushpull_shared(keys, given, out),
        lambda: store.empty(BIG),
    )
    taken = len(calls)
    for call in calls:
        try:
            call()
        except ForkError:
            taken -= 1
    return taken


def read(arrays):
    """Read all of them; 0 when they can be."""
    return int(not all(np.isfinite(array.sum()) for array in arrays))


def closed():
    """After `close` and the last array nothing is mapped here, and nothing is open."""
    store = joined()
    value = store.empty(BIG)
    value.fill(1)
    store.init("w", value)
    meet_servers(store, "w")
    (view,) = store.pushpull_shared(["w"], [value], [np.empty(BIG, np.float32)])
    assert view is not None and segments_mapped() > 0
    total = view.copy()
    store.barrier()
    store.close()
    assert (view == total).all() and (value == 1).all(), "arrays outlive their store"
    del store, value, view
    gc.collect()
    say(f"mapped by peers {segments_mapped()}, views {segments_mapped(('rw-p',))}, own {segments_mapped(('rw-s',))}")
    say(f"open {sum('kvdist-arena' in one for one in descriptors())}")


def descriptors():
    """What this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


if __name__ == "__main__":
    used = globals()[sys.argv[1]](*sys.argv[2:])
    if used is not None:
        rank, count = used.rank, used.num_workers
        used.close()
        print(f"checked on {rank} of {count}", flush=True)
