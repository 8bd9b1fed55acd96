"""Searchers that sample choices, by a Markov chain and by REINFORCE."""

from __future__ import annotations

import math
import random

from torchweld.distributed.planner.costs import Choice
from torchweld.distributed.planner.space import SearchSpace


def walk(
    problem: SearchSpace, steps: int = 3000, seed: int = 0, heat: float = 0.05
) -> Choice | None:
    """Find a fast choice by a Markov chain that changes one or two fields at a time (MCMC)."""
    generator = random.Random(seed)
    names = [*problem.axes]
    here = {name: values[0] for name, values in problem.axes.items()}
    seconds, best, fastest = math.inf, None, math.inf
    for _ in range(steps):
        there = dict(here)
        for name in generator.sample(names, generator.choice((1, 1, 2, 3))):
            there[name] = generator.choice(problem.axes[name])
        choice = problem.make(**there)
        new = problem.find_seconds(choice)
        # A choice that does not fit is left by any move.
        ratio = new / seconds if math.isfinite(seconds) else 1.0
        if ratio <= 1 or generator.random() < ratio ** (-1 / heat):
            here, seconds = there, new
        if new < fastest:
            best, fastest = choice, new
    return best


def reinforce(
    problem: SearchSpace, steps: int = 3000, seed: int = 0, rate: float = 0.3
) -> Choice | None:
    """Find a fast choice by REINFORCE: a distribution for each field learns from samples."""
    generator = random.Random(seed)
    scores = {name: [0.0] * len(values) for name, values in problem.axes.items()}
    best, fastest, baseline = None, math.inf, None
    for _ in range(steps):
        drawn, shares = {}, {}
        for name, values in problem.axes.items():
            weights = [math.exp(score) for score in scores[name]]
            shares[name] = [weight / sum(weights) for weight in weights]
            drawn[name] = generator.choices(range(len(values)), weights)[0]
        choice = problem.make(**{name: problem.axes[name][at] for name, at in drawn.items()})
        seconds = problem.find_seconds(choice)
        if seconds < fastest:
            best, fastest = choice, seconds
        if not math.isfinite(fastest):
            continue
        reward = -math.log(seconds) if math.isfinite(seconds) else -math.log(fastest) - 2
        baseline = reward if baseline is None else 0.9 * baseline + 0.1 * reward
        for name, at in drawn.items():
            for k, share in enumerate(shares[name]):
                scores[name][k] += rate * (reward - baseline) * ((k == at) - share)
    return best
