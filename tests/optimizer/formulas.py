"""The published equations, written out with plain expressions, apart from how the library computes them.

Each takes weight, summed and rescaled gradient, the rule's memory (a dict, empty at first), the number of the update
from 1, learning rate, weight decay, hyper-parameters and the clipping limit, and returns the new weight. Arrays keep
the shape of the parameter and their type: in float64 they are an oracle, in float32 one of few roundings.
"""

from __future__ import annotations

import math

import numpy as np


def cut(values, limit):
    return values if limit is None else np.minimum(np.maximum(values, -limit), limit)


def old(s, name, like):
    return s.get(name, np.zeros_like(like))


def norm(values):
    return float(np.sqrt(np.sum(values.astype(np.float64) ** 2)))


def sgd(w, g, s, t, lr, wd, h, clip):
    s["m"] = h.get("momentum", 0.0) * old(s, "m", w) - lr * (cut(g, clip) + wd * w)
    return w + s["m"]


def nag(w, g, s, t, lr, wd, h, clip):
    g = cut(g, clip) + wd * w
    mu = h.get("momentum", 0.9)
    s["m"] = mu * old(s, "m", w) - lr * g
    return w + mu * s["m"] - lr * g


def signum(w, g, s, t, lr, wd, h, clip):
    mu, wd_lh = h.get("momentum", 0.9), h.get("wd_lh", 0.0)
    if mu == 0:
        return (1 - lr * (wd + wd_lh)) * w - lr * np.sign(g)
    s["m"] = mu * old(s, "m", w) - (1 - mu) * (cut(g, clip) + wd * w)
    return (1 - lr * wd_lh) * w + lr * np.sign(s["m"])


def dcasgd(w, g, s, t, lr, wd, h, clip):
    g = cut(g, clip) + wd * w
    d = g + h.get("lamda", 0.04) * g * g * (w - s.get("before", w))
    s["m"] = h.get("momentum", 0.0) * old(s, "m", w) - lr * d
    s["before"] = w.copy()
    return w + s["m"]


def sgld(w, g, s, t, lr, wd, h, clip):
    # Element i has word i of Philox with the counter's second word t; its key holds the seed and the name "w".
    name = 0x59DCB0F0C0086C33
    generator = np.random.Philox(key=np.array([h.get("seed", 0), name], np.uint64), counter=[0, t, 0, 0])
    high, low = np.divmod(generator.random_raw(w.size), np.uint64(2**32))
    noise = np.sqrt(-2 * np.log((high.astype(float) + 1) / 2**32)) * np.cos(2 * math.pi * low.astype(float) / 2**32)
    noise = (noise.reshape(w.shape) * math.sqrt(lr)).astype(w.dtype)
    return w - lr / 2 * (cut(g, clip) + wd * w) + noise


def adam(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-8)
    g = cut(g, clip) + wd * w
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["v"] = b2 * old(s, "v", w) + (1 - b2) * g**2
    return w - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * s["m"] / (np.sqrt(s["v"]) + eps)


def adamw(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-6)
    g = cut(g, clip)
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["v"] = b2 * old(s, "v", w) + (1 - b2) * g**2
    eta = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if h.get("correct_bias", True) else lr
    return w - eta * (s["m"] / (np.sqrt(s["v"]) + eps) + wd * w)


def adabelief(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-6)
    g = cut(g + wd * w, clip)
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["s"] = b2 * old(s, "s", w) + (1 - b2) * (g - s["m"]) ** 2 + eps
    eta = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if h.get("correct_bias", True) else lr
    return w - eta * s["m"] / (np.sqrt(s["s"]) + eps)


def adamax(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-8)
    g = cut(g, clip) + wd * w
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["u"] = np.maximum(b2 * old(s, "u", w), np.abs(g))
    return w - lr / (1 - b1**t) * s["m"] / (s["u"] + eps)


def nadam(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-8)
    decay = h.get("schedule_decay", 0.004)
    g = cut(g, clip) + wd * w
    mu_now, mu_next = (b1 * (1 - 0.5 * 0.96 ** (k * decay)) for k in (t, t + 1))
    schedule = math.prod(b1 * (1 - 0.5 * 0.96 ** (k * decay)) for k in range(1, t + 1))
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["v"] = b2 * old(s, "v", w) + (1 - b2) * g**2
    g_hat, m_hat, v_hat = g / (1 - schedule), s["m"] / (1 - schedule * mu_next), s["v"] / (1 - b2**t)
    return w - lr * ((1 - mu_now) * g_hat + mu_next * m_hat) / (np.sqrt(v_hat) + eps)


def adagrad(w, g, s, t, lr, wd, h, clip):
    g = cut(g, clip) + wd * w
    s["h"] = old(s, "h", w) + g**2
    return w - lr * g / (np.sqrt(s["h"]) + h.get("epsilon", 1e-6))


def groupadagrad(w, g, s, t, lr, wd, h, clip):
    g = cut(g, clip)
    s["h"] = s.get("h", 0) + (g**2).mean(axis=1, keepdims=True)
    return w - lr * g / (np.sqrt(s["h"]) + h.get("epsilon", 1e-6))


def adadelta(w, g, s, t, lr, wd, h, clip):
    rho, eps = h.get("rho", 0.9), h.get("epsilon", 1e-6)
    g = cut(g, clip) + wd * w
    s["a"] = rho * old(s, "a", w) + (1 - rho) * g**2
    delta = np.sqrt(old(s, "b", w) + eps) / np.sqrt(s["a"] + eps) * g
    s["b"] = rho * old(s, "b", w) + (1 - rho) * delta**2
    return w - lr * delta


def rmsprop(w, g, s, t, lr, wd, h, clip):
    rho, mu, eps = h.get("rho", 0.9), h.get("momentum", 0.9), h.get("epsilon", 1e-8)
    g = cut(g, clip) + wd * w
    s["n"] = rho * old(s, "n", w) + (1 - rho) * g**2
    if h.get("centered", False):
        s["q"] = rho * old(s, "q", w) + (1 - rho) * g
        s["delta"] = mu * old(s, "delta", w) - lr * g / np.sqrt(s["n"] - s["q"] ** 2 + eps)
        return cut(w + s["delta"], h.get("clip_weights"))
    return cut(w - lr * g / (np.sqrt(s["n"]) + eps), h.get("clip_weights"))


def ftrl(w, g, s, t, lr, wd, h, clip):
    lamda1, beta = h.get("lamda1", 0.01), h.get("beta", 1.0)
    g = cut(g, clip)
    n = old(s, "n", w)
    s["z"] = old(s, "z", w) + g - (np.sqrt(n + g**2) - np.sqrt(n)) * w / lr
    s["n"] = n + g**2
    shrunk = np.maximum(np.abs(s["z"]) - lamda1, 0)
    return -np.sign(s["z"]) * shrunk / ((beta + np.sqrt(s["n"])) / lr + wd)


def ftml(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.6), h.get("beta2", 0.999), h.get("epsilon", 1e-8)
    g = cut(g, clip) + wd * w
    s["v"] = b2 * old(s, "v", w) + (1 - b2) * g**2
    d = (1 - b1**t) / lr * (np.sqrt(s["v"] / (1 - b2**t)) + eps)
    s["z"] = b1 * old(s, "z", w) + (1 - b1) * g - (d - b1 * old(s, "d", w)) * w
    s["d"] = d
    return -s["z"] / d


def lars(w, g, s, t, lr, wd, h, clip):
    eta, eps = h.get("eta", 0.001), h.get("epsilon", 1e-8)
    of_w, of_g = norm(w), norm(g)
    rate = lr * eta * of_w / (of_g + wd * of_w + eps) if of_w > 0 and of_g > 0 else lr
    s["m"] = h.get("momentum", 0.0) * old(s, "m", w) - rate * (cut(g, clip) + wd * w)
    return w + s["m"]


def bounded(length, h):
    length = max(length, h.get("lower_bound", 0))
    return min(length, h.get("upper_bound", math.inf))


def trust(w, step, h):
    of_w, of_step = bounded(norm(w), h), norm(step)
    return of_w / of_step if of_w > 0 and of_step > 0 else 1.0


def lamb(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-6)
    g = cut(g, clip)
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["v"] = b2 * old(s, "v", w) + (1 - b2) * g**2
    m_hat, v_hat = s["m"], s["v"]
    if h.get("bias_correction", True):
        m_hat, v_hat = m_hat / (1 - b1**t), v_hat / (1 - b2**t)
    step = m_hat / (np.sqrt(v_hat) + eps) + wd * w
    return w - lr * trust(w, step, h) * step


def lans(w, g, s, t, lr, wd, h, clip):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-6)
    g = cut(g / norm(g) if norm(g) > 0 else g, clip)
    s["m"] = b1 * old(s, "m", w) + (1 - b1) * g
    s["v"] = b2 * old(s, "v", w) + (1 - b2) * g**2
    root = np.sqrt(s["v"] / (1 - b2**t)) + eps
    p = s["m"] / (1 - b1**t) / root + wd * w
    q = g / root + wd * w
    return w - lr * (b1 * trust(w, p, h) * p + (1 - b1) * trust(w, q, h) * q)


def plus_gradient(w, g, s, t, lr, wd, h, clip):
    return w + cut(g, clip)


TABLE = [
    ("sgd", {}, sgd),
    ("sgd", {"momentum": 0.9}, sgd),
    ("nag", {}, nag),
    ("nag", {"momentum": 0.5}, nag),
    ("signum", {}, signum),
    ("signum", {"momentum": 0.0, "wd_lh": 0.1}, signum),
    ("signum", {"momentum": 0.5, "wd_lh": 0.1}, signum),
    ("dcasgd", {}, dcasgd),
    ("dcasgd", {"momentum": 0.9, "lamda": 0.5}, dcasgd),
    ("sgld", {}, sgld),
    ("sgld", {"seed": 77}, sgld),
    ("adam", {}, adam),
    ("adam", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}, adam),
    ("adamw", {}, adamw),
    ("adamw", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "correct_bias": False}, adamw),
    ("adabelief", {}, adabelief),
    ("adabelief", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "correct_bias": False}, adabelief),
    ("adamax", {}, adamax),
    ("adamax", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}, adamax),
    ("nadam", {}, nadam),
    ("nadam", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "schedule_decay": 0.5}, nadam),
    ("adagrad", {}, adagrad),
    ("adagrad", {"epsilon": 0.1}, adagrad),
    ("groupadagrad", {}, groupadagrad),
    ("groupadagrad", {"epsilon": 0.1}, groupadagrad),
    ("adadelta", {}, adadelta),
    ("adadelta", {"rho": 0.5, "epsilon": 0.1}, adadelta),
    ("rmsprop", {}, rmsprop),
    ("rmsprop", {"rho": 0.5, "epsilon": 0.1, "clip_weights": 0.75}, rmsprop),
    ("rmsprop", {"centered": True, "epsilon": 1e-3}, rmsprop),
    ("rmsprop", {"centered": True, "momentum": 0.5, "epsilon": 0.1, "clip_weights": 0.75}, rmsprop),
    ("ftrl", {}, ftrl),
    ("ftrl", {"lamda1": 1.0, "beta": 0.1}, ftrl),
    ("ftml", {}, ftml),
    ("ftml", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}, ftml),
    ("lars", {"eta": 0.1}, lars),
    ("lars", {"momentum": 0.9, "eta": 0.5, "epsilon": 1e-3}, lars),
    ("lamb", {}, lamb),
    ("lamb", {"bias_correction": False, "upper_bound": 1.0, "epsilon": 1e-3}, lamb),
    ("lamb", {"lower_bound": 100.0}, lamb),
    ("lans", {}, lans),
    ("lans", {"beta1": 0.8, "beta2": 0.9, "upper_bound": 1.0, "epsilon": 1e-3}, lans),
    ("test", {}, plus_gradient),
]
"""Name, hyper-parameters that are not the defaults, formula."""

IDS = [name + "".join(f"-{key}={value}" for key, value in numbers.items()) for name, numbers, _ in TABLE]

NO_DECAY = {"groupadagrad"}
"""Rules that refuse weight decay."""


def shape_of(size):
    """A matrix of so many elements, with rows of odd length where that is possible."""
    row = next(row for row in (7, 5, 3, 1) if size % row == 0)
    return size // row, row
