"""fuse() on models of transformers keeps results and the course of training, in each dtype."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from models import IS_TESTED_RELEASE, MODELS, WITH_OTHER_NORMS, batch, build, list_welds, tokens

import torchweld
from torchweld import functional, numerics
from torchweld.fusion.graph.regions import Region

STEPS = 20
UNIT = 2.0**-23


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let the kernels serve small inputs too, with graphs of each test's own."""
    torch.compiler.reset()
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


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients(name: str) -> None:
    """In evaluation and in training."""
    model, given = build(name), batch(name)
    exact = copy.deepcopy(model).double()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    for training in (False, True):
        for m in (torchweld.unfuse(model), exact):
            m.train(training)
        plain, truth = _results(model, given), _results(exact, wide)
        torchweld.fuse(model)
        _agree(_results(model, given), plain, truth)
    assert list_welds(model) == MODELS[name] or not IS_TESTED_RELEASE
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def _generate(model: Any) -> torch.Tensor:
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(tokens()["input_ids"][:2, :9], **how)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WITH_OTHER_NORMS)
def test_models_with_other_norms(name: str) -> None:
    """Logits, losses, gradients, what is generated, and the model cast to 16 bits afterwards."""
    model, given = build(name).eval(), tokens()
    plain, truth = _results(model, given), _results(copy.deepcopy(model).double(), given)
    said = _generate(model)
    torchweld.fuse(model)
    _agree(_results(model, given), plain, truth)
    assert list_welds(model) == WITH_OTHER_NORMS[name] or not IS_TESTED_RELEASE
    assert torch.equal(_generate(model), said)
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


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_with_checkpoints(name: str) -> None:
    """The losses agree to 1e-3; peer_trainer.py trains without checkpoints."""
    plain, fused, given = build(name).train(), build(name).train(), batch(name)
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    for model in (plain, torchweld.fuse(fused)):
        next(filter(None, (getattr(model, each, None) for each in names)))()
    expected = _losses(plain, given)
    assert expected[-1] < 0.98 * expected[0]
    assert _losses(fused, given) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_dropout_of_another_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's dropouts in place of ours it is the same curve again."""

    def as_torch(x: Any, residual: Any, weight: Any, bias: Any, **how: Any) -> Any:
        z = torch.nn.functional.dropout(x, how["p"]) + residual
        y = functional.layer_norm(z, weight.shape, weight, bias, how["eps"])
        return (y, z) if how.get("return_residual") else y

    def attend_as_torch(q: Any, k: Any, v: Any, layout: Any, **how: Any) -> Any:
        mask, p, causal = how["bias"], how["dropout_p"], how["causal"]
        own = torch.nn.functional.scaled_dot_product_attention
        return own(q, k, v, mask, p, causal, scale=how["scale"])

    plain, fused, given = build(name, 0.1).train(), build(name, 0.1).train(), batch(name)
    torchweld.fuse(fused)
    ours = _losses(copy.deepcopy(fused), given)
    monkeypatch.setattr(functional, "dropout_add_layer_norm", as_torch)
    monkeypatch.setattr(functional, "block_sparse_attention", attend_as_torch)
    expected = _losses(plain, given)
    assert _losses(fused, given) == pytest.approx(expected, rel=1e-3)
    # Different dropout changes a loss about as much as another seed does.
    assert ours != pytest.approx(expected, rel=1e-6)
    assert ours == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_compiled(name: str) -> None:
    """Losses and gradients of a model that is fused before or after it is compiled."""
    model, given = build(name), batch(name)
    expected = _results(model, given)
    for model in (torchweld.fuse(build(name)), build(name)):
        compiled: Any = torch.compile(model, backend="aot_eager")
        if not any(isinstance(module, Region) for module in model.modules()):
            _results(compiled, given)
            torchweld.fuse(compiled)
        torch.testing.assert_close([*_results(compiled, given)], [*expected], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5", "GPT2"])
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


# --- Rotary embeddings ----------------------------------------------------------------------------

OTHER_FORMS = [
    *("Glm", "Glm4", "Ernie4_5", "Helium", "Cohere"),  # interleaved
    *("Phi", "StableLm", "Persimmon", "GPTNeoX"),  # some of the columns
    *("GptOss", "Falcon"),  # an angle for a pair; a forward with an argument of its own
    *("DeepseekV2", "Llama4", "DINOv3"),  # complex; the last tokens
]


FORMS_OF: dict[str, Any] = {
    "Llama4": lambda: models.make("Llama4", intermediate_size_mlp=64, num_local_experts=2),
    "DINOv3": lambda: models.make(
        *("DINOv3ViT", "Model"), image_size=32, patch_size=8, num_register_tokens=2
    ),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms(name: str) -> None:
    """Results, gradients and what is generated are eager's; some compute angles in float32."""
    model = (FORMS_OF[name]() if name in FORMS_OF else build(name)).eval()
    fused = torchweld.fuse(copy.deepcopy(model))
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    images = name == "DINOv3"
    given = {"pixel_values": pixels} if images else {"input_ids": tokens()["input_ids"]}
    results = []
    exact = copy.deepcopy(fused).double()
    for each in (exact, copy.deepcopy(model).double()):
        y = each(**given)[0]
        parameters = list(each.parameters())
        grads = torch.autograd.grad(y.square().mean(), parameters, allow_unused=True)
        flat = [grad.flatten() for grad in grads if grad is not None]
        results.append((y, torch.cat(flat)))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    if not images:
        assert torch.equal(_generate(fused), _generate(model))
    found = list_welds(exact) | list_welds(fused)  # complex numbers of float64 are left
    rotated = 2 * found["rotary_embedding_qk"] + found["rotary_embedding"]
    assert rotated == 4 or not IS_TESTED_RELEASE


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_a_welded_layer_compiles_and_comes_back(name: str) -> None:
    model = build(name)
    layer = torchweld.fuse(model).model.layers[0]
    generator = torch.Generator().manual_seed(0)
    x, angles = (torch.randn(2, 8, width, generator=generator) for width in (64, 16))
    names = ["position_embeddings"]
    if "position_embeddings_local" in inspect.signature(layer.forward).parameters:  # 4.56's
        names = ["position_embeddings_global", "position_embeddings_local"]
    given: Any = {**dict.fromkeys(names, (angles, angles)), "attention_mask": None}
    expected = layer(x, **given)
    assert list_welds(layer)["rotary_embedding_qk"] == 1
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **given), expected)
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied(x, **given), expected, **numerics.SAME)
    torchweld.unfuse(model)
    assert not any(isinstance(module, Region) for module in model.modules())
    torch.testing.assert_close(layer(x, **given), expected)


# --- Named models ---------------------------------------------------------------------------------


def _run_in(model: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    given = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch(name).items()}
    with torch.no_grad():
        return model.to(dtype).eval()(**given).logits.double()  # type: ignore[no-any-return]


@pytest.mark.skipif(not IS_TESTED_RELEASE, reason="another release has other models")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", models.NAMES)
def test_fused_in_each_dtype(name: str) -> None:
    """In 16 bits the fused model is as near to the exact one as the eager model."""
    model = build(name)
    fused = torchweld.fuse(copy.deepcopy(model))
    exact = _run_in(copy.deepcopy(model), name, torch.float64)
    size = _rms(exact)
    # Many models compute their norms or angles in float32 whatever the parameters are.
    assert _rms(_run_in(copy.deepcopy(fused), name, torch.float64) - exact) <= 1e-6 * size
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eager, ours = (
            _rms(_run_in(copy.deepcopy(each), name, dtype) - exact) for each in (model, fused)
        )
        assert ours <= 1.5 * eager + torch.finfo(dtype).eps * size


# Texts of Python's and torch's exceptions, and of their types' arguments.
_RAW = re.compile(r"positional argument|sparse_coo|must match|object has no|Expected|\d+D|indices'")
# Other tests explain most of the named models.
EXPLAINED = (
    "GPTJ",
    "Falcon",
    "Persimmon",
    "GptOss",
    "DeepseekV3",
    "Roberta",
    "Bart",
    "Swin",
    "ViT",
)


@pytest.mark.skipif(not IS_TESTED_RELEASE, reason="another release has other reasons")
@pytest.mark.parametrize("name", [*EXPLAINED, "Mamba2", "Bamba"])
def test_lines_are_short_and_reasons_are_ours(name: str) -> None:
    report = torchweld.explain_fusion(build(name).train(), **batch(name))
    assert report
    assert max(map(len, str(report).splitlines())) <= 100
    for row in report:
        assert not _RAW.search(row.reason), row


def test_our_norms_in_place_of_a_models() -> None:
    """torchweld.nn.RMSNorm loads LlamaRMSNorm's weights: the same loss, gradients and keys."""
    plain, ours = build("Llama"), build("Llama")
    norms = [n for n, m in ours.named_modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert len(norms) == 5
    for name in norms:
        old = ours.get_submodule(name)
        norm = torchweld.nn.RMSNorm(old.weight.shape, eps=old.variance_epsilon)
        norm.load_state_dict(old.state_dict())
        ours.set_submodule(name, norm)
    assert list(plain.state_dict()) == list(ours.state_dict())
    (loss, *expected), (found, *grads) = (_results(m.train(), tokens())[1:] for m in (plain, ours))
    torch.testing.assert_close(found, loss, **numerics.SUMMED_SMALL)
    for grad, wanted in zip(grads, expected, strict=True):
        assert (grad - wanted).abs().max() <= 1e-4 * wanted.abs().max()
