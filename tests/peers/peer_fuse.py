"""fuse() on models of transformers keeps logits, losses, gradients and the course of training."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import IS_TESTED_RELEASE, MODELS, WITH_OTHER_NORMS, batch, build, tokens

import torchweld
from torchweld import functional
from torchweld.fusion import Weld

STEPS = 20
UNIT = 2.0**-23
# Dropouts that a weld draws from torchweld's stream: with these, other elements are dropped.
DRAWN_ANEW = {"bert", "roberta", "t5"}


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let the kernels serve small inputs too."""
    with torchweld.use_backend("cpu", "eager"):
        yield


def _results(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """Logits in evaluation (a fused language model has none in training), loss, gradients."""
    torch.manual_seed(1)
    output = model(**given)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        (output.loss if model.training else output.logits).detach(),
        output.loss.detach(),
        *torch.autograd.grad(output.loss, parameters),
    ]


def _rms(values: torch.Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt())


def _agree(found: list[torch.Tensor], plain: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    """Twice the original's error against float64, and some units of rounding of what is compared.

    A gradient may be zero but for rounding: all of them together have a size.
    """
    size = max(_rms(value) for value in truth[2:])
    for at, (a, b, exact) in enumerate(zip(plain, found, truth, strict=True)):
        scale = _rms(exact) if at < 2 else size
        assert _rms(b - exact) <= 2 * _rms(a - exact) + 8 * UNIT * scale


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients(name: str, p: float) -> None:
    """In evaluation, and in training if both drop the same elements."""
    model, given = build(name, p), batch(name)
    exact = copy.deepcopy(model).double()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    for training in (False, True) if p == 0 or name not in DRAWN_ANEW else (False,):
        for m in (torchweld.unfuse(model), exact):
            m.train(training)
        plain, truth = _results(model, given), _results(exact, wide)
        torchweld.fuse(model)
        _agree(_results(model, given), plain, truth)
    if IS_TESTED_RELEASE:
        rows = torchweld.explain_fusion(model)
        assert Counter(row.becomes for row in rows if row.welded) == MODELS[name][2]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("name", WITH_OTHER_NORMS)
def test_models_with_other_norms(name: str) -> None:
    """Logits, losses, gradients, what is generated, and the model cast to 16 bits afterwards."""
    model, given = build(name).eval(), tokens()
    plain, truth = _results(model, given), _results(copy.deepcopy(model).double(), given)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = given["input_ids"][:2, :9]
    said = model.generate(prompt, **how)
    torchweld.fuse(model)
    if IS_TESTED_RELEASE:
        found = Counter(row.becomes for row in torchweld.explain_fusion(model) if row.welded)
        assert found == WITH_OTHER_NORMS[name][1]
    _agree(_results(model, given), plain, truth)
    assert torch.equal(model.generate(prompt, **how), said)
    with torch.no_grad():
        cast, expected = model.bfloat16()(**given).logits, build(name).eval().bfloat16()(**given)
    assert _rms(cast - truth[0]) <= 1.5 * _rms(expected.logits - truth[0])


def _losses(model: Any, given: dict[str, Any]) -> list[float]:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("way", ["plain", "checkpointed", "dropout"])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps(name: str, way: str) -> None:
    """The losses agree to 1e-3."""
    if way == "dropout" and name in DRAWN_ANEW:
        pytest.skip("drops other elements: test_dropout_of_another_stream")
    p = 0.1 if way == "dropout" else 0.0
    plain, fused, given = build(name, p), build(name, p), batch(name)
    torchweld.fuse(fused)
    for model in (plain, fused):
        model.train()
        if way == "checkpointed":
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            next(filter(None, (getattr(model, name, None) for name in names)))()
    expected = _losses(plain, given)
    assert expected[-1] < 0.98 * expected[0]
    assert _losses(fused, given) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", sorted(DRAWN_ANEW - {"t5"}))
def test_dropout_of_another_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's dropout before the residual norm in place of ours it is the same curve again."""

    def as_torch(x: Any, residual: Any, weight: Any, bias: Any, **how: Any) -> Any:
        z = torch.nn.functional.dropout(x, how["p"], how["training"]) + residual
        return functional.layer_norm(z, weight.shape, weight, bias, how["eps"]), z

    plain, fused, given = build(name, 0.1).train(), build(name, 0.1).train(), batch(name)
    torchweld.fuse(fused)
    ours = _losses(copy.deepcopy(fused), given)
    monkeypatch.setattr(functional, "dropout_add_layer_norm", as_torch)
    expected = _losses(plain, given)
    assert _losses(fused, given) == pytest.approx(expected, rel=1e-3)
    # Different dropout changes a loss about as much as another seed does.
    assert ours != pytest.approx(expected, rel=1e-6)
    assert ours == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled(name: str) -> None:
    """Losses and gradients of a model that is fused before or after it is compiled."""
    model, given = build(name), batch(name)
    expected = _results(model, given)
    for model in (torchweld.fuse(build(name)), build(name)):
        compiled: Any = torch.compile(model, backend="aot_eager")
        if not any(isinstance(module, Weld) for module in model.modules()):
            _results(compiled, given)
            torchweld.fuse(compiled)
        for a, b in zip(_results(compiled, given), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "gpt2"])
def test_bfloat16_and_autocast(name: str) -> None:
    """Further from float64 than the original by no more than a half; dtypes are the original's."""
    given = batch(name)
    truth = _results(build(name).double().eval(), given)[0]
    for cast in (False, True):
        model = (build(name) if cast else build(name).bfloat16()).eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            plain = model(**given).logits
            found = torchweld.fuse(model)(**given).logits
        assert found.dtype == plain.dtype
        assert _rms(found - truth) <= 1.5 * _rms(plain - truth)
