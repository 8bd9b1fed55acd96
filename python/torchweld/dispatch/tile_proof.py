"""Which tile of a Triton kernel serves a class of launches: the declared one, or a timed one.

The tile by rule serves until `torchweld tune` has found a faster one here. Its results are the
trusted ones: the check of the op, which comes first, compares them with the reference in float64.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from torchweld.dispatch import proof
from torchweld.dispatch.proof import Question, Results
from torchweld.numerics import unit_of


@functools.cache
def connect() -> None:
    """Let the Triton kernels ask."""
    module: Any = importlib.import_module("torchweld.triton_kernels.tiled")
    module.choose = choose_tile


def choose_tile(on: torch.Tensor, tiled: Any) -> Any:
    """The tile that serves this class of launches: a timed one that is stored, or by rule."""
    make = functools.partial(_make_question, on, tiled)
    name, is_final = proof.pick((on.device, tiled.key), make)
    if not is_final:
        importlib.import_module("torchweld.triton_kernels.launch").forbid_replay()
    return next(tile for tile in tiled.tiles if str(tile) == name)


def _make_question(on: torch.Tensor, tiled: Any) -> Question:
    run = importlib.import_module("torchweld.triton_kernels.launch").run
    tiles = {str(tile): tile for tile in tiled.tiles}
    by_rule, *others = tiles

    def find_results(name: str) -> Results:
        # Results that were allocated in inference mode can be changed only there.
        with torch.inference_mode(any(result.is_inference() for result in tiled.results)):
            # Lines that are divided leave parts of their results unwritten.
            for result in tiled.results:
                result.zero_()
            run(on, *tiled.launches_with(tiles[name]))
            return {str(at): result.clone() for at, result in enumerate(tiled.results)}

    by_rule_results = functools.cache(functools.partial(find_results, by_rule))
    return Question(
        kind=tiled.describe(),
        size=tiled.size,
        device=on.device,
        fallback=by_rule,
        candidates=others,
        run=find_results,
        trusted=by_rule_results,
        exact=by_rule_results,
        # Sums in another order: a few numbers, and factors of products, round the other way.
        rounded=unit_of(on.dtype),
        prepare=lambda name: functools.partial(run, on, *tiled.launches_with(tiles[name])),
    )
