"""What do local steps cost in loss? A small GPT on a made-up language, by each way from as many tokens.

    python benchmarks/local_steps_loss.py
    python benchmarks/local_steps_loss.py --steps 500 --ways sync "diloco:100,fragments=4 int4:bf16" --lr 3e-3

Workers are processes of this machine, and see text that no other step and no other worker sees. Every way has the same
model, texts, batches, AdamW and schedule, and its best learning rate of those given; the loss is that of the weights of
all workers on text that nobody has learned from. A way is a policy, and behind it how pushes and answers are
compressed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from cluster import Start, end_on_terminate, environment, launch_command, run_together, worker_command

WAYS = ["sync", "local_sgd:100", "diloco:100", "diloco:100,fragments=4", "diloco:100,fragments=4 int4:bf16"]
SETTLED = 1e-4
"""Workers' losses differ by no more: they look at the same weights."""


def losses(way: str, lr: float, seed: int, options: argparse.Namespace) -> list[tuple[int, float]]:
    """[(tokens, loss)] of one run.

    Raises:
        RuntimeError: the job failed; the message holds what it printed.
    """
    policy, _, compression = way.partition(" ")
    with tempfile.TemporaryDirectory(prefix="local-steps-loss-") as folder:
        words = (folder, str(options.steps), str(lr), str(seed), compression)
        command = launch_command(options.workers, options.servers, worker_command("gpt_worker.py", *words))
        variables = {} if policy == "sync" else {"KVDIST_POLICY": policy}
        run_together([Start(command, environment(**variables))], options.timeout)
        found = [json.loads(Path(folder, f"{rank}.json").read_text())["curve"] for rank in range(options.workers)]
    ends = [curve[-1][1] for curve in found]
    if max(ends) - min(ends) > SETTLED:
        raise RuntimeError(f"the workers of {way} end with different weights: losses {ends}")
    return [(int(tokens), float(loss)) for tokens, loss in found[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500, help="of each worker")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    options = parser.parse_args()
    end_on_terminate()
    first: float | None = None
    print(f"{'loss in nats':36} {'rate':>7} {'tokens':>9} {'loss':>7} {'of the first':>13}")
    for way in options.ways:
        runs = {lr: [losses(way, lr, seed, options) for seed in range(options.seeds)] for lr in options.lr}
        best = min(runs, key=lambda lr: statistics.mean(curve[-1][1] for curve in runs[lr]))
        loss = statistics.mean(curve[-1][1] for curve in runs[best])
        first = loss if first is None else first
        print(f"{way:36} {best:7.0e} {runs[best][0][-1][0]:9} {loss:7.4f} {loss / first - 1:+12.2%}", flush=True)
        for lr, curves in runs.items():
            means = [statistics.mean(at[1] for at in looks) for looks in zip(*curves, strict=True)]
            print(f"    {lr:.0e}: {' '.join(f'{loss:.3f}' for loss in means)}", flush=True)


if __name__ == "__main__":
    main()
