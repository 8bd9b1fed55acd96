"""parallelize() of transformers' models after fuse(): the steps of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import transformers

import torchweld
from processes import processes
from torchweld.distributed import parallelize, recompute
from torchweld.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, MICROBATCHES, STEPS = 2, 2, 3
MIXTURES = ["Mixtral"]


def _compute_loss(result: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = result.logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _start(name: str, config: Any) -> Any:
    build = small_models.mixture if name in MIXTURES else small_models.build
    return parallelize(
        torchweld.fuse(build(name).train()),
        config,
        device="cpu",
        example=(torch.zeros((ROWS, 24), dtype=torch.int64),),
        loss_fn=_compute_loss,
        microbatches=MICROBATCHES,
        max_norm=1.0,
        quiet=True,
    )


def _train(rank: int, name: str, config: Any, path: str) -> None:
    training = _start(name, {**config, "optimizer": {"name": "adamw", "lr": 1e-2}})
    found = []
    for step in range(STEPS):
        batch = []
        for number in training.own:
            generator = torch.Generator().manual_seed(10 * step + number)
            tokens = torch.randint(3, 128, (ROWS, 25), generator=generator)
            batch.append((tokens[:, :-1], tokens[:, 1:]))
        found.append(training.step(batch, step)[1].item())
    if rank == 0:
        torch.save(found, path)


def _run(count: int, *given: Any, path: Path) -> list[float]:
    with processes(count) as some:
        some.run(None, _train, *given, str(path))
    return torch.load(path)  # type: ignore[no-any-return]


CONFIGS: list[dict[str, Any]] = [
    {"data": "zero1"},
    {"data": "zero3", "checkpoint": "selective"},
    {"data": "zero2", "checkpoint": "full"},
    {"tensor": 2},
    {"tensor": {"size": 2, "sequence": True}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt", *MIXTURES])
def test_a_model_trains_as_in_one_process(name: str, config: Any, tmp_path: Path) -> None:
    """Norms of all gradients, whose parameters come from the steps before."""
    alone = _run(1, name, {}, path=tmp_path / "alone")
    assert alone[0] != alone[1]
    assert _run(2, name, config, path=tmp_path / "shared") == pytest.approx(alone, rel=1e-4)


def test_a_block_that_recomputes_takes_no_cache() -> None:
    """A cache with tokens is refused; an empty one stays empty."""
    model = small_models.build("llama").train()
    layers, given = model.model.layers, {"input_ids": torch.randint(3, 128, (2, 8))}
    for at, layer in enumerate(layers):
        layers[at] = recompute(layer)
    cache = transformers.DynamicCache()
    model(**given, **{small_models.CACHE: cache}).logits.sum().backward()
    assert cache.get_seq_length() == 0
    filled = getattr(small_models.build("llama")(**given), small_models.CACHE)
    with pytest.raises(ArgumentError, match="cache is one of 8 tokens; accepted: an empty one"):
        model(**given, **{small_models.CACHE: filled})


def _refuse(rank: int) -> None:
    before = copy.deepcopy(small_models.build("llama"))
    with pytest.raises(ArgumentError, match=r"model is a LlamaForCausalLM; .* stage\(number"):
        _start("llama", "pp")
    assert {type(p) for p in before.parameters()} == {torch.nn.Parameter}


def test_a_pipeline_needs_stages() -> None:
    with processes(2) as two:
        two.run(None, _refuse)
