"""Heads of models of images, speech and pairs of sequences: fuse() takes their loss.

As a script, it measures all classes that can be made small and writes the second table of
docs/welds.md, or the rows of the architectures that it is given.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import models
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torchweld
from torchweld.fusion.logits import Logits

PAGE = Path(__file__).parents[2] / "docs" / "welds.md"
_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
_TESTED = (
    *("llava", "gemma3", "internvl", "qwen2_audio", "whisper", "bart", "t5", "canary"),
    "paligemma",  # computes something else where it is compiled
)


def list_classes() -> dict[str, str]:
    """The class with a head of each architecture."""
    names: dict[str, str] = {}
    for mapping in _MAPPINGS:
        for kind, name in getattr(modeling_auto, mapping).items():
            if kind in CONFIG_MAPPING:
                names.setdefault(kind, name if isinstance(name, str) else name[0])
    return names


def make(kind: str) -> Any:
    """A small model without dropout, the same each time."""
    config, cls = CONFIG_MAPPING[kind](), getattr(transformers, list_classes()[kind])
    _shrink(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > models.LARGEST:
        raise ValueError(f"it is large, with {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = cls(config).train()
    for name, row in model.named_buffers():
        if name == "final_logits_bias":
            row.copy_(torch.linspace(-1, 1, row.numel()))
    return model


def _shrink(config: Any) -> None:
    config.decoder_start_token_id = 0
    values = list(vars(config).items())
    for _, value in values:
        if hasattr(value, "model_type"):
            _shrink(value)
    for name, size in models.SIZES.items():
        try:
            if hasattr(config, name):
                setattr(config, name, size)
        except Exception:  # a config whose layers differ refuses some
            continue
    for name, value in values:
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def list_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of which a model takes the first that it can."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    text = {"input_ids": ids, "labels": ids}
    yield from (text, {**text, "token_type_ids": torch.zeros_like(ids)})
    yield from ({**text, "decoder_input_ids": ids}, {**text, "attention_mask": ids.sign()})
    for shape in ((80, 3000), (80, 64), (64, 80), (128, 3000), (64, 128)):
        yield {"input_features": torch.randn(2, *shape, generator=generator), "labels": ids}
    for sizes in ((3200,), (64, 64)):
        yield {"input_values": torch.randn(2, *sizes, generator=generator), "labels": ids}
    for size in (32, 64, 224):
        pixels = torch.randn(2, 3, size, size, generator=generator)
        yield from ({**text, "pixel_values": pixels}, {"pixel_values": pixels, "labels": ids})


class Step(NamedTuple):
    """What a training step gives."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    logits: Any


def step(model: Any, batch: dict[str, torch.Tensor]) -> Step:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return Step(out.loss.detach().double(), grads, out.logits)


def step_exactly(model: Any) -> tuple[dict[str, torch.Tensor], Step]:
    """The first batch that the model takes, and its step in float64."""
    exact, reasons = copy.deepcopy(model).double(), []
    for batch in list_batches():
        wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        try:
            return batch, step(exact, wide)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")
    raise ValueError(f"it takes no batch: {reasons[0]}")


def read_error(got: Step, exact: Step) -> float:
    """The relative error of all gradients together."""
    assert got.grads.keys() == exact.grads.keys()
    lost = sum(float((got.grads[n] - g).square().sum()) for n, g in exact.grads.items())
    return float((lost / sum(float(g.square().sum()) for g in exact.grads.values())) ** 0.5)


def measure(kind: str) -> tuple[bool, float]:
    """Whether logits are lazy, and the gradients' error as a multiple of eager's."""
    torch.compiler.reset()
    model = make(kind)
    batch, exact = step_exactly(model)
    plain = read_error(step(model, batch), exact)
    got = step(torchweld.fuse(model), batch)
    return isinstance(got.logits, Logits), read_error(got, exact) / plain


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let the kernels serve small inputs too."""
    with torchweld.use_backend("cpu", "eager"):
        yield


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize("kind", [kind for kind in _TESTED if kind in list_classes()])
def test_a_head_takes_its_loss(kind: str) -> None:
    """75 of 133 classes kept their logits: their words were counted in an inner config only, a row
    was added to the logits, or the head had another name. The tests had causal models only.
    """
    is_lazy, error = measure(kind)
    assert is_lazy
    assert error <= 3


_HEAD = "| class | takes the loss, error |"


def write(rows: dict[str, tuple[bool, float]]) -> None:
    """Write rows into the page's second table."""
    text = PAGE.read_text()
    start, body = text[: text.index(_HEAD)], text[text.index(_HEAD) :]
    lines = {line.split("`")[1]: line for line in body.splitlines()[2:]}
    for name, (is_lazy, error) in rows.items():
        lines[name] = f"| `{name}` | {'yes' if is_lazy else 'no'}, {error:.2f} |"
    table = [_HEAD, "|---|--|", *(lines[name] for name in sorted(lines))]
    PAGE.write_text(start + "\n".join(table) + "\n")


if __name__ == "__main__":
    measured = {}
    for kind in sys.argv[1:] or list_classes():
        try:
            with torchweld.use_backend("cpu", "eager"):
                measured[list_classes()[kind]] = measure(kind)
        except (Exception, SystemExit) as error:  # models that cannot be made small
            print(f"{kind}: {re.sub(chr(10), ' ', str(error))[:110]}")
    write(measured)
