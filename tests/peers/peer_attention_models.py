"""Models with learnt biases and values of another width, from configs: training as eager's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import list_welds, make

import torchweld
from torchweld import huggingface, numerics
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockLayout

STEPS = 20
DENSE = functools.partial(BlockLayout.dense, block=16)


_TINY = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
_T5: dict[str, Any] = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64}
_T5 |= {"dropout_rate": 0.0, "relative_attention_max_distance": 20}
_LATENT: dict[str, Any] = {"moe_intermediate_size": 16, "num_key_value_heads": 4, "q_lora_rank": 16}
_LATENT |= {"qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": 8}
_LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def _draw_tokens(step: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(step))


def _draw_pairs(step: int) -> dict[str, Any]:
    padding = torch.ones(2, 50, dtype=torch.long)
    padding[1, 40:] = 0
    length = 30 if step % 2 else 50  # the decoder's queries are then fewer than the keys
    labels = _draw_tokens(1000 + step, 2, length)
    return {"input_ids": _draw_tokens(step, 2, 50), "attention_mask": padding, "labels": labels}


def _draw_long(step: int) -> dict[str, Any]:
    """Lengths that no block divides, with padding of two sizes."""
    padding = torch.ones(3, 50, dtype=torch.long)
    padding[1, 41:] = padding[2, 3:] = 0
    labels = _draw_tokens(1000 + step, 3, 20)
    return {"input_ids": _draw_tokens(step, 3, 50), "attention_mask": padding, "labels": labels}


def _draw_packed(step: int) -> dict[str, Any]:
    """Two rows of documents whose lengths differ by step, told by position ids only."""
    x, cuts, places = _draw_tokens(step, 2, 60), _draw_tokens(1000 + step, 2) % 45 + 5, []
    for row, cut in enumerate(cuts.tolist()):
        lengths = (cut, 60 - cut) if row else (cut, 4, 56 - cut)
        places.append(torch.cat([torch.arange(n) for n in lengths]))
    return {"input_ids": x, "labels": x, "position_ids": torch.stack(places)}


def _draw_causal(step: int) -> dict[str, Any]:
    x = _draw_tokens(step, 2, 40)
    return {"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)}


def _draw_images(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 5, (2,), generator=generator)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": labels}


def _make_pairs(kind: str) -> Any:
    return make(kind, "ForConditionalGeneration", **_T5)


def _make_long(attends: str) -> Any:
    long = {"local_radius": 7, "global_block_size": 4, "encoder_attention_type": attends}
    return make("LongT5", "ForConditionalGeneration", **_T5, **long)


def _make_swin() -> Any:
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_labels": 5},
        **{"num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    return transformers.SwinForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    **{kind: (functools.partial(_make_pairs, kind), _draw_pairs) for kind in ("T5", "MT5", "UMT5")},
    "LongT5": (functools.partial(_make_long, "local"), _draw_long),
    "LongT5 with globals": (functools.partial(_make_long, "transient-global"), _draw_long),
    "DeepSeek-V3": (lambda: make("DeepseekV3", **_TINY, **_LATENT), _draw_causal),
    "packed Llama": (lambda: make("Llama", **_TINY, head_dim=8), _draw_packed),
    "Swin": (_make_swin, _draw_images),
}


def _make(name: str, how: str) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """A model that runs eager attention, ours over dense layouts or windows, or is fused."""
    build, draw = MODELS[name]
    model = build()
    is_long = name.startswith("LongT5")  # which transformers gives no attention but eager's
    own = {"eager": "eager", "layout": huggingface.NAME, "fused": "eager" if is_long else "sdpa"}
    model.set_attn_implementation(own[how])
    if how == "layout":
        has_two = hasattr(model, "decoder")
        for part in (model.encoder, model.decoder) if has_two else (model,):
            huggingface.set_layout(part, None if is_long and part is model.encoder else DENSE)
    elif how == "fused":
        torchweld.fuse(model)
    return model, draw


def _train(name: str, how: str) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    """The losses, the first gradients of bias tables, and what the model generates."""
    model, draw = _make(name, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, tables = [], []
    for step in range(STEPS):
        loss = model(**draw(step)).loss
        optimizer.zero_grad()
        loss.backward()
        if not step:
            named = model.named_parameters()
            tables = [p.grad.clone() for key, p in named if "relative" in key]
        optimizer.step()
        losses.append(loss.detach())
    if how == "fused":
        plain = name.startswith("LongT5") or name == "packed Llama"
        assert ("block_sparse_attention" in list_welds(model)) != plain
    generated = None
    if name not in ("Swin", "packed Llama"):
        given = {key: value for key, value in draw(0).items() if key != "labels"}
        model.eval()
        generated = model.generate(**given, max_new_tokens=9, do_sample=False, pad_token_id=0)
    return torch.stack(losses), tables, generated


@functools.cache
def _train_eagerly(name: str) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    return _train(name, "eager")


@pytest.mark.parametrize("how", ["layout", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_training_and_generating_as_eager(name: str, how: str) -> None:
    """20 steps to 1e-4, the gradients of bias tables to 1e-5, and the same tokens."""
    huggingface.register()
    mine, tables, tokens = _train(name, how)
    theirs, their_tables, their_tokens = _train_eagerly(name)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    assert bool(tables) == (name not in ("DeepSeek-V3", "packed Llama"))
    for a, b in zip(tables, their_tables, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    if tokens is not None:
        assert torch.equal(tokens, their_tokens)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5", "LongT5", "LongT5 with globals"])
def test_every_layer_teaches_the_table_under_checkpoints(name: str, reentrant: bool) -> None:
    """A reentrant checkpoint runs the layer that hands its table on without a graph."""
    huggingface.register()
    found = []
    for how in ("eager", "layout"):
        model, draw = _make(name, how)
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model(**draw(0), use_cache=False).loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters() if "relative" in key})
    eager, mine = found
    assert all(grad.any() for grad in eager.values())
    for key, grad in eager.items():
        torch.testing.assert_close(mine[key], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attends", ["local", "transient-global"])
@pytest.mark.parametrize("length", [3, 8, 50, 97])
def test_long_t5s_encoder(attends: str, length: int) -> None:
    """Its own window equals its own code where a token counts, also with fewer than a block."""
    huggingface.register()
    encoder = _make_long(attends).encoder
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "relative" in name:
                parameter.normal_()
    x = torch.randint(1, 100, (2, length))
    keep = torch.ones(2, length, dtype=torch.long)
    keep[1, length // 2 + 1 :] = 0
    results = []
    for ours in (False, True):
        if ours:
            huggingface.set_layout(encoder, None)
            encoder = copy.deepcopy(encoder)  # which has layouts and tables of its own
        y = encoder(input_ids=x, attention_mask=keep).last_hidden_state[keep.bool()]
        parameters = dict(encoder.named_parameters())
        grads = torch.autograd.grad(
            y.sin().sum(), list(parameters.values()), materialize_grads=True
        )
        results.append([y, *grads])
    for a, b in zip(*results, strict=True):
        size = a.detach().abs().max().clamp(1e-6)  # fewer tokens than a block have no sums
        torch.testing.assert_close(b / size, a / size, **numerics.CHAINED_SMALL)


def test_long_t5_over_another_layout() -> None:
    """A window of its radius in tokens is its own; arguments without an effect are refused."""
    model = _make_long("local")
    x = {key: _draw_long(0)[key] for key in ("input_ids", "attention_mask")}
    results = []
    for layout in (None, functools.partial(BlockLayout.sliding_window, window_size=(7, 7))):
        huggingface.set_layout(model.encoder, layout)
        results.append(model.encoder(**x).last_hidden_state)
    assert torch.equal(*results)
    with pytest.raises(ArgumentError, match="output_attentions"):
        model.encoder(**x, output_attentions=True)
    with pytest.raises(ArgumentError, match="no attention of this model has a window"):
        huggingface.set_layout(_make_pairs("T5").encoder, None)


def test_a_copy_has_a_table_of_its_own() -> None:
    huggingface.register()
    model, draw = _make("T5", "layout")
    model.eval()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if "relative" in name:
                parameter.add_(torch.randn_like(parameter))
    other, _ = _make("T5", "eager")
    other.load_state_dict(copied.state_dict())
    with torch.no_grad():
        given = draw(0)
        losses = [each(**given).loss for each in (copied, other.eval(), model)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)
    assert (losses[0] - losses[2]).abs() > 1e-3


def test_t5s_table_is_not_expanded() -> None:
    """Over a window, an encoder's peak grows with its length, and its bias stays a table."""
    model = _make_pairs("T5")
    huggingface.register()
    model.set_attn_implementation(huggingface.NAME)
    window = functools.partial(BlockLayout.sliding_window, window_size=(20, 20), block=16)
    huggingface.set_layout(model.encoder, window)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                sizes.append(made.numel())
            return made

    length = 1024
    with Sizes():
        y = model.encoder(input_ids=torch.ones(1, length, dtype=torch.long)).last_hidden_state
        y.sum().backward()
    assert max(sizes) < length * length
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.any()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["T5", "DeepSeek-V3"])
def test_a_fused_attention_with_padding(name: str, left: bool) -> None:
    """Logits of unpadded tokens, gradients and generated tokens match torch's SDPA."""
    build, draw = MODELS[name]
    model, given = build(), draw(0)
    length = given["input_ids"].shape[1]
    keep = torch.ones(2, length, dtype=torch.long)
    padded = torch.arange(length) < 9 if left else torch.arange(length) >= length - 9
    keep[1, padded] = 0
    given["attention_mask"] = keep
    if name == "T5":
        given["decoder_attention_mask"] = keep[:, : given["labels"].shape[1]]
    results = []
    for fused in (False, True):
        if fused:
            torchweld.fuse(model.eval())
        logits = model(**given).logits
        counted = given.get("decoder_attention_mask", keep).bool()
        loss = logits[counted].square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        prompt = {key: given[key] for key in ("input_ids", "attention_mask")}
        ids = model.eval().generate(**prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
        results.append([logits[counted], ids, *grads])
    for found, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


def test_another_function_for_sdpa_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody registers one after fuse()."""
    functions = transformers.AttentionInterface._global_mapping
    own, model = functions["sdpa"], make("T5", "ForConditionalGeneration").eval()
    fused = torchweld.fuse(copy.deepcopy(model))
    before = fused(**_draw_pairs(0)).logits
    monkeypatch.setitem(functions, "sdpa", lambda *a, **more: (3 * own(*a, **more)[0], None))
    logits = fused(**_draw_pairs(0)).logits
    torch.testing.assert_close(logits, model(**_draw_pairs(0)).logits, **numerics.CHAINED_SMALL)
    assert not torch.allclose(logits, before, rtol=1e-2)
