"""Examples of advertisements shown, in the format of the Criteo data sets; read from files, or made by a rule.

A line of such a file has, separated by tabs, the label (1: clicked), 13 counts and 26 categories of eight hexadecimal
digits; a count or category may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COUNTS, CATEGORIES = 13, 26
_MIX = np.uint64(0x9E3779B97F4A7C15)
_CATEGORIES_OF_A_FIELD = 500
_DIM = 4


@dataclass(frozen=True)
class Examples:
    """labels: (n,) float32; counts: (n, 13) float32, log-scaled; ids: (n, 26) int64, rows of the table."""

    labels: np.ndarray
    counts: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def read(paths: Iterable[Path], table_rows: int, limit: int | None = None) -> Examples:
    """The examples of files in the format of Criteo, at most `limit` of them.

    Args:
        paths: of the files.
        table_rows: categories are hashed to row ids below this.
        limit: None for all.

    Raises:
        ValueError: a line has another format; it names file and line.
    """
    labels, counts, categories = [], [], []
    for where, fields in _lines(paths, limit):
        try:
            labels.append(float(fields[0]))
            counts.append([float(field or 0) for field in fields[1 : 1 + COUNTS]])
            categories.append([int(field or "0", 16) for field in fields[1 + COUNTS :]])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not labels:
        raise ValueError(f"no examples in {', '.join(map(str, paths))}")
    ids = hashed(np.array(categories, np.uint64), table_rows)
    return Examples(np.array(labels, np.float32), np.log1p(np.maximum(counts, 0)).astype(np.float32), ids)


def _lines(paths: Iterable[Path], limit: int | None) -> Iterator[tuple[str, list[str]]]:
    found = 0
    for path in paths:
        with path.open(encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                if found == limit:
                    return
                fields = line.rstrip("\n").split("\t")
                if len(fields) != 1 + COUNTS + CATEGORIES:
                    raise ValueError(
                        f"{path}, line {number}: {len(fields)} fields, where a label, {COUNTS} counts and {CATEGORIES}"
                        " categories are expected, separated by tabs"
                    )
                found += 1
                yield f"{path}, line {number}", fields


def hashed(categories: np.ndarray, table_rows: int) -> np.ndarray:
    """(n, 26) row ids: a category of one field is another row than the same one of the next field."""
    fields = np.arange(CATEGORIES, dtype=np.uint64)
    mixed = (categories + (fields << np.uint64(32))) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * _MIX) >> np.uint64(1)).astype(np.int64) % table_rows


def generated(count: int, table_rows: int, seed: int = 0) -> Examples:
    """Examples made by a rule that a factorisation machine can learn: the label depends on pairs of categories.

    Each category has a hidden weight and a hidden vector. The chance of a click is the sigmoid of the sum of weights,
    of the products of the first four fields' vectors, and of one count. Few categories are frequent, most are rare.
    """
    random = np.random.default_rng(seed)
    categories = np.minimum(random.zipf(1.3, (count, CATEGORIES)), _CATEGORIES_OF_A_FIELD) - 1
    counts = random.poisson(random.gamma(1.0, 5.0, (count, COUNTS)))
    rule = np.random.default_rng(12345)  # the same for every seed: training and test data follow one rule
    weights = rule.normal(0, 0.4, (CATEGORIES, _CATEGORIES_OF_A_FIELD))
    vectors = rule.normal(0, 1.0, (4, _CATEGORIES_OF_A_FIELD, _DIM))
    logits = sum(weights[field, categories[:, field]] for field in range(CATEGORIES))
    chosen = [vectors[field, categories[:, field]] for field in range(4)]
    logits = logits + (chosen[0] * chosen[1]).sum(axis=1) + (chosen[2] * chosen[3]).sum(axis=1)
    scaled = np.log1p(counts).astype(np.float32)
    logits = logits + 0.8 * (scaled[:, 0] - 1.4) - 1.0
    labels = (random.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return Examples(labels, scaled, hashed(categories.astype(np.uint64), table_rows))


def write(examples: int, path: Path, seed: int = 0) -> None:
    """Write a small file in the format of Criteo, with random content: to try out what reads one."""
    random = np.random.default_rng(seed)
    with path.open("w", encoding="ascii") as file:
        for _ in range(examples):
            counts = [str(number) if number % 5 else "" for number in random.integers(0, 50, COUNTS)]
            categories = [f"{number:08x}" for number in random.integers(0, 100, CATEGORIES)]
            file.write("\t".join([str(random.integers(0, 2)), *counts, *categories]) + "\n")


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a clicked example has a higher score than one that was not; 0.5 is guessing."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    _, places, repeated = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.bincount(places, ranks) / repeated)[places]  # equal scores share their ranks
    clicked = labels > 0.5
    pairs = clicked.sum() * (~clicked).sum()
    return float((ranks[clicked].sum() - clicked.sum() * (clicked.sum() + 1) / 2) / pairs) if pairs else float("nan")
