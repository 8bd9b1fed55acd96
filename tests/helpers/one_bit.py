"""1-bit Adam and 1-bit LAMB in numpy, from the papers' and DeepSpeed's published algorithms.

All ranks run in one process, in float32 with float64 sums, and without torchweld.
"""

from __future__ import annotations

from typing import Any

import numpy as np

F = np.float32
Arrays = list[np.ndarray]


def compress(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quantised x, scale times sign, and its error. The sign of 0 is 1."""
    scale = F(np.sqrt(np.square(x.astype(np.float64)).sum() / x.size)) if x.size else F(0)
    sent = np.where(x >= 0, scale, -scale).astype(F)
    return sent, x - sent


class Compressed:
    """Error-compensated 1-bit averaging over W workers; each worker averages one chunk."""

    def __init__(self, workers: int, size: int) -> None:
        chunk = max(8, 8 * -(-size // (8 * workers)))
        self.cuts = [min(w * chunk, size) for w in range(workers + 1)]
        self.worker = [np.zeros(size, F) for _ in range(workers)]
        self.server = [np.zeros(b - a, F) for a, b in zip(self.cuts, self.cuts[1:], strict=False)]

    def mean(self, given: Arrays) -> np.ndarray:
        sent = []
        for w, x in enumerate(given):
            one, self.worker[w] = compress(x + self.worker[w])
            sent.append(one)
        if len(given) == 1:
            return sent[0]
        total = np.zeros_like(given[0])
        for one in sent:
            total = total + one
        mean, found = total / F(len(given)), []
        for r, (a, b) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            one, self.server[r] = compress(mean[a:b] + self.server[r])
            found.append(one)
        return np.concatenate(found)


class Adam:
    """Takes OneBitAdam's arguments, and each parameter's own. step() takes workers' gradients."""

    def __init__(
        self, params: Arrays, workers: int, own: list[dict[str, Any]] | None = None, **s: Any
    ) -> None:
        common: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999)}
        common |= {"eps": 1e-8, "weight_decay": 0.0} | s
        self.s = [common | each for each in own or [{}] * len(params)]
        self.params, self.t, self.workers = params, 0, workers
        self.m, self.v = ([np.zeros_like(p) for p in params] for _ in range(2))
        self.reducers = self.make_reducers()
        self.rounded = lambda x: x  # rounds to the storage dtype of parameters and mean gradients

    def make_reducers(self) -> list[Compressed]:
        return [Compressed(self.workers, p.size) for p in self.params]

    def mean(self, grads: list[Arrays], i: int) -> np.ndarray:
        total = grads[0][i].astype(F)
        for of_worker in grads[1:]:
            total = total + of_worker[i].astype(F)
        return self.rounded(total / F(self.workers))

    def step(self, grads: list[Arrays]) -> None:
        self.t += 1
        if self.t > self.s[0]["freeze_step"]:
            self.compressed(grads)
            return
        for i, p in enumerate(self.params):
            b1, b2 = self.s[i]["betas"]
            g = self.mean(grads, i)
            self.m[i] = self.m[i] * F(b1) + g * F(1 - b1)
            self.v[i] = self.v[i] * F(b2) + g * g * F(1 - b2)
            self.move(i, p, self.direction(i, p))

    def direction(self, i: int, p: np.ndarray) -> np.ndarray:
        u = self.m[i] / (np.sqrt(self.v[i]) + F(self.s[i]["eps"]))
        return u + p * F(self.s[i]["weight_decay"])

    def move(self, i: int, p: np.ndarray, u: np.ndarray, ratio: float = 1.0) -> None:
        p[...] = self.rounded(p - u * F(self.s[i]["lr"] * ratio))

    def mixed(self, grads: list[Arrays], w: int, i: int) -> np.ndarray:
        b1 = self.s[i]["betas"][0]
        return self.m[i] * F(b1) + grads[w][i].astype(F) * F(1 - b1)

    def freeze(self) -> None:
        """Elements that never had a gradient do not move."""
        self.v = [np.where(v == 0, F(np.inf), v) for v in self.v]

    def compressed(self, grads: list[Arrays]) -> None:
        self.freeze()
        for i, p in enumerate(self.params):
            own = [self.mixed(grads, w, i).ravel() for w in range(self.workers)]
            self.m[i] = self.reducers[i].mean(own).reshape(p.shape)
            self.move(i, p, self.direction(i, p))


class Lamb(Adam):
    """Takes OneBitLAMB's arguments."""

    def __init__(
        self, params: Arrays, workers: int, own: list[dict[str, Any]] | None = None, **s: Any
    ) -> None:
        lambs = {"trust_clip": (0.01, 10.0), "coeff_beta": 0.9, "factor_clip": (0.5, 4.0)}
        super().__init__(params, workers, own, **(lambs | {"factor_threshold": 0.1} | s))
        self.coeff, self.factor = [0.0] * len(params), [1.0] * len(params)
        self.fresh: Arrays = []
        self.scaling: list[np.float32] = []

    def make_reducers(self) -> list[Compressed]:
        return [Compressed(self.workers, sum(p.size for p in self.params))]

    def move(self, i: int, p: np.ndarray, u: np.ndarray, ratio: float | None = None) -> None:
        if ratio is None:
            norms = [np.sqrt(np.square(x.astype(np.float64)).sum()) for x in (p, u)]
            ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
            ratio = float(np.clip(ratio, *self.s[i]["trust_clip"]))
            if ratio != 1:
                beta = self.s[i]["coeff_beta"]
                self.coeff[i] = beta * self.coeff[i] + (1 - beta) * ratio
        super().move(i, p, u, ratio)

    def compressed(self, grads: list[Arrays]) -> None:
        self.freeze()
        if not self.fresh:
            self.fresh = [v.copy() for v in self.v]
            sizes = [np.sqrt(np.square(m.astype(np.float64)).mean()) for m in self.m]
            self.scaling = [F(np.mean(sizes) / size) if size > 0 else F(1) for size in sizes]
        own = [
            np.concatenate(
                [(self.mixed(grads, w, i) * c).ravel() for i, c in enumerate(self.scaling)]
            )
            for w in range(self.workers)
        ]
        flat, begin = self.reducers[0].mean(own), 0
        for i, p in enumerate(self.params):
            m = flat[begin : begin + p.size].reshape(p.shape) / self.scaling[i]
            begin += p.size
            (b1, b2), eps = self.s[i]["betas"], F(self.s[i]["eps"])
            decay = self.s[i]["weight_decay"]
            previous, self.m[i] = self.m[i], m
            g = (self.m[i] - previous * F(b1)) / F(1 - b1)
            self.fresh[i] = self.fresh[i] * F(b2) + g * g * F(1 - b2)
            root = np.sqrt(self.v[i]) + eps
            quotient = np.where(np.isinf(root), F(1), root) / (
                np.where(np.isinf(root), F(1), np.sqrt(self.fresh[i]) + eps)
            )
            factor = float(quotient.max())
            u, prelim = self.direction(i, p), self.m[i] / root
            if decay > 0:
                norms = [np.sqrt(np.square(x.astype(np.float64)).sum()) for x in (prelim, u)]
                share = min(1.0, norms[0] / norms[1])
                factor = factor * share + 1 - share
            factor = float(np.clip(factor, *self.s[i]["factor_clip"]))
            last, change = self.factor[i], self.s[i]["factor_threshold"]
            self.factor[i] = float(np.clip(factor, last * (1 - change), last * (1 + change)))
            self.move(i, p, u, self.coeff[i] * self.factor[i])
