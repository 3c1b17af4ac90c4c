"""A small GPT learns a made-up language on several workers; how well it predicts unseen text at the end.

python gpt_worker.py FOLDER STEPS LR SEED [PUSHED:PULLED]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from kvdist import Trainer, kv

SYMBOLS, CONTEXT, BATCH = 64, 48, 16
WIDTH, LAYERS, HEADS = 96, 4, 4
"""0.46 M parameters."""
TOPICS, SUCCESSORS = 16, 6
WARMUP, TEST_BATCHES = 100, 8


class Language:
    """Texts of symbols: each depends on the two before it, and on a topic that a text keeps and never says.

    A text of topic t follows, with probabilities that fall as 1, ½, ⅓, …, the successors that a table drawn from the
    seed has for (t, the symbol before, the symbol before that modulo 4).
    """

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._next = torch.randint(SYMBOLS, (TOPICS, SYMBOLS, 4, SUCCESSORS), generator=draw)
        self._weights = 1.0 / torch.arange(1, SUCCESSORS + 1)

    def texts(self, count: int, seed: int) -> Tensor:
        """(count, CONTEXT + 1) symbols; the same ones for the same seed."""
        draw = torch.Generator().manual_seed(seed)
        topic = torch.randint(TOPICS, (count,), generator=draw)
        text = torch.empty((count, CONTEXT + 1), dtype=torch.long)
        text[:, :2] = torch.randint(SYMBOLS, (count, 2), generator=draw)
        choices = torch.multinomial(self._weights, count * CONTEXT, replacement=True, generator=draw)
        for place, choice in enumerate(choices.view(CONTEXT, count)[: CONTEXT - 1], start=2):
            text[:, place] = self._next[topic, text[:, place - 1], text[:, place - 2] % 4, choice]
        return text


class Layer(nn.Module):
    """Attention to what came before, and a perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        split = [
            part.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in self.attend(self.norms[0](x)).chunk(3, dim=2)
        ]
        seen = scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(seen)
        return x + self.perceptron(self.norms[1](x))


class GPT(nn.Module):
    """Symbols (texts, CONTEXT) to logits (texts, CONTEXT, SYMBOLS)."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)
        for one in (self.symbols, self.places):
            nn.init.normal_(one.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.symbols(text) + self.places.weight[: text.shape[1]])))


def loss_of(net: GPT, text: Tensor) -> Tensor:
    """The mean over all symbols but the first, in nats."""
    return cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    folder, steps, lr, seed = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    pushed, _, pulled = (sys.argv[5] if len(sys.argv) > 5 else "").partition(":")
    compression = ({"type": pushed} | ({"pull": pulled} if pulled else {})) if pushed else None
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    language, net = Language(seed), GPT()
    tests = [language.texts(32, 1_000_000_000 + number) for number in range(TEST_BATCHES)]
    with kv.create("dist") as store:
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
        trainer = Trainer(net.parameters(), optimizer, kvstore=store, compression_params=compression)
        for step in range(steps):
            rest = 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / WARMUP) * (0.1 + 0.9 * rest)
            optimizer.zero_grad()
            loss_of(net, language.texts(BATCH, 1 + step * store.num_workers + store.rank)).backward()
            trainer.step()
        trainer.exchange()
        with torch.no_grad():
            loss = sum(float(loss_of(net, text)) for text in tests) / TEST_BATCHES
        found = {
            "parameters": sum(one.numel() for one in net.parameters()),
            "tokens": steps * store.num_workers * BATCH * CONTEXT,
            "loss": loss,
        }
        (folder / f"{store.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
