"""Workers train a linear model together with plain NumPy: ``training.py STORE least_squares|logistic``.

Each has a part of the examples and sees the loss on all of them at the end.
"""

import sys

import numpy as np

from kvdist import kv

STEPS, EXAMPLES, FEATURES = 200, 240, 6


def least_squares(x, y, w):
    error = x @ w - y
    return float((error**2).mean() / 2), x.T @ error / len(y)


def logistic(x, y, w):
    label = (y > 0).astype(float)
    probability = 1 / (1 + np.exp(-x @ w))
    loss = -np.log(np.where(label > 0, probability, 1 - probability) + 1e-12).mean()
    return float(loss), x.T @ (probability - label) / len(y)


def main():
    store, problem = kv.create(sys.argv[1]), globals()[sys.argv[2]]
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, FEATURES))
    y = x @ np.arange(1.0, FEATURES + 1)
    mine = slice(store.rank, None, store.num_workers)
    weight = np.zeros(FEATURES)
    first, _ = problem(x, y, weight)
    store.init("w", weight)
    store.set_optimizer("sgd", learning_rate=0.2, momentum=0.5, rescale_grad=1 / store.num_workers)
    for _ in range(STEPS):
        _, grad = problem(x[mine], y[mine], weight)
        store.pushpull("w", grad, out=weight)
    store.barrier()
    store.pull("w", out=weight)
    last, _ = problem(x, y, weight)
    print(f"loss {first:.9f} {last:.9f}", flush=True)
    store.close()


if __name__ == "__main__":
    main()
