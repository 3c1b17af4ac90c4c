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


def trained(way: str, lr: float, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Parameters, tokens learned from and loss of one run.

    Raises:
        RuntimeError: the job failed; the message holds what it printed.
    """
    policy, _, compression = way.partition(" ")
    with tempfile.TemporaryDirectory(prefix="local-steps-loss-") as folder:
        words = (folder, str(options.steps), str(lr), str(seed), compression)
        command = launch_command(options.workers, options.servers, worker_command("gpt_worker.py", *words))
        variables = {} if policy == "sync" else {"KVDIST_POLICY": policy}
        run_together([Start(command, environment(**variables))], options.timeout)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.workers)]
    ends = [one["loss"] for one in found]
    if max(ends) - min(ends) > SETTLED:
        raise RuntimeError(f"the workers of {way} end with different weights: losses {ends}")
    print(f"    {way}, rate {lr:.0e}, seed {seed}: {found[0]['loss']:.4f}", flush=True)
    return dict(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=1500, help="of each worker")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    options = parser.parse_args()
    end_on_terminate()
    first: float | None = None
    print(f"{'loss in nats':36} {'tokens':>9} {'loss':>7} {'of the first':>13}   by rate")
    for way in options.ways:
        runs = {lr: [trained(way, lr, seed, options) for seed in options.seeds] for lr in options.lr}
        means = {lr: statistics.mean(one["loss"] for one in runs[lr]) for lr in runs}
        loss, tokens = min(means.values()), next(iter(runs.values()))[0]["tokens"]
        first = loss if first is None else first
        by_rate = ", ".join(f"{lr:.0e} {mean:.4f}" for lr, mean in means.items())
        print(f"{way:36} {tokens:9.0f} {loss:7.4f} {loss / first - 1:+13.2%}   {by_rate}", flush=True)


if __name__ == "__main__":
    main()
