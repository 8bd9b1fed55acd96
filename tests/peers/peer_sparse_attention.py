"""Models of transformers train with block-sparse layouts."""

from __future__ import annotations

import ast
import copy
import functools
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from models import CACHE
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

from torchweld import ArgumentError, huggingface, numerics
from torchweld.sparse import BlockLayout

LENGTH, VOCABULARY = 96, 128
NO_DROPOUT = dict.fromkeys(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
    ),
    0.0,
)
_WINDOW = {"sliding_window": 40}
# The end of a model's name, and sizes of its own.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("Bert", "Roberta"), ("Model", {})),
    "Bart": ("Model", {"init_std": 0.2}),
    "OPT": ("ForCausalLM", {"word_embed_proj_dim": 64}),
    "GPT2": ("LMHeadModel", {}),
    "Llama": ("ForCausalLM", {}),
    "Mistral": ("ForCausalLM", _WINDOW),
    "Gemma2": (
        "ForCausalLM",
        {**_WINDOW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16},
    ),
    "GptOss": ("ForCausalLM", {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def _make(name: str, kind: str, **more: Any) -> Any:
    """A model with this implementation of attention."""
    end, own = MADE[name]
    positions = {"max_position_embeddings": 256, "n_positions": 256}
    model = models.make(name, end, **positions, **NO_DROPOUT, **own | more)
    model.set_attn_implementation(kind)
    return model


huggingface.register()
WINDOW = functools.partial(BlockLayout.sliding_window, num_sliding_window_blocks=3, block=16)


def _pair(name: str, layout: Any) -> list[Any]:
    """A model with sdpa, and the same model with a layout."""
    plain, sparse = (_make(name, kind) for kind in ("sdpa", huggingface.NAME))
    huggingface.set_layout(sparse, layout)
    return [plain, sparse]


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a long sequence and a short one."""
    torch.manual_seed(1)
    keep = torch.ones(2, LENGTH, dtype=torch.int64)
    keep[1, 70:] = 0
    return torch.randint(2, VOCABULARY, (2, LENGTH)), keep


def _assert_alike(pair: list[Any], arguments: list[dict[str, Any]]) -> None:
    """Outputs and gradients are the same, except at padding."""
    _, keep = _tokens()
    found = []
    for model, given in zip(pair, arguments, strict=True):
        y = model(**given)[0]
        y[keep.bool()].square().mean().backward()
        found.append(y[keep.bool()].detach())
    torch.testing.assert_close(*found, **numerics.CHAINED)
    expected = dict(pair[0].named_parameters())
    for name, parameter in pair[1].named_parameters():
        wanted = expected[name].grad
        if wanted is None:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        # A key's bias shifts all scores of a query equally: its gradient is only rounding error.
        floor = 1e-5 * max(p.grad.abs().max() for p in expected.values() if p.grad is not None)
        error = (parameter.grad - wanted).abs().max()
        assert error <= 1e-3 * wanted.abs().max() + floor, name


@pytest.mark.parametrize("name", ["Bert", "Roberta", "OPT", "GPT2"])
def test_a_dense_layout_is_sdpa(name: str) -> None:
    """Padding, the causal mask and scales arrive as transformers means them."""
    tokens, keep = _tokens()
    given = {"input_ids": tokens, "attention_mask": keep}
    pair = _pair(name, functools.partial(BlockLayout.dense, block=16))
    _assert_alike(pair, [given, given])


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_a_layout_is_its_mask(name: str) -> None:
    """A model with a layout trains like one with sdpa and the layout's token mask."""
    tokens, keep = _tokens()
    pair = _pair(name, WINDOW)
    seen = WINDOW((LENGTH, LENGTH)).to_mask() & keep.bool()[:, None, None]
    if name == "GPT2":
        seen = seen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen = seen.expand(2, 1, LENGTH, LENGTH) | torch.eye(LENGTH, dtype=torch.bool)
    plain = {"input_ids": tokens, "attention_mask": seen}
    sparse = {"input_ids": tokens, "attention_mask": keep}
    if name == "GPT2":
        plain["position_ids"] = sparse["position_ids"] = torch.arange(LENGTH)[None]
    _assert_alike(pair, [plain, sparse])


def test_layers_have_layouts_of_their_own() -> None:
    tokens, _ = _tokens()
    _, model = _pair("GPT2", WINDOW)
    whole = copy.deepcopy(model)(tokens)[0]
    huggingface.set_layout(model, functools.partial(BlockLayout.dense, block=16), layers=[1])
    mixed = model(tokens)[0]
    assert not torch.allclose(mixed, whole)
    huggingface.set_layout(model, WINDOW, layers=[1])
    torch.testing.assert_close(model(tokens)[0], whole)
    with pytest.raises(ArgumentError, match="layers"):
        huggingface.set_layout(model, WINDOW, layers=[7])


@pytest.mark.parametrize("length", [LENGTH, 80])
def test_attention_to_an_encoder_is_dense(length: int) -> None:
    """Only the decoder's attention to itself has a layout, though the lengths may be equal."""
    tokens, keep = _tokens()
    plain, sparse = (_make("Bart", kind).eval() for kind in ("sdpa", huggingface.NAME))
    huggingface.set_layout(sparse.encoder, functools.partial(BlockLayout.dense, block=16))
    huggingface.set_layout(sparse.decoder, WINDOW)
    seen = WINDOW((length, length)).to_mask() & torch.ones(length, length).tril().bool()
    given = {"input_ids": tokens, "attention_mask": keep, "use_cache": False}
    given["decoder_input_ids"] = tokens[:, :length]
    wanted = plain(**given, decoder_attention_mask=seen.expand(2, 1, -1, -1))
    found = sparse(**given)
    torch.testing.assert_close(found[0], wanted[0], **numerics.CHAINED)
    whole = plain(**given)[0]
    assert not torch.allclose(found[0], whole, atol=1e-3)


def test_causality_that_a_model_leaves_to_its_mask() -> None:
    """Moonshine's decoder says that it is not causal where it has a mask of padding."""
    counted = ("num_hidden_layers", "num_attention_heads")
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in counted}
    config = transformers.MoonshineConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, pad_token_id=0, **sides
    )
    found = []
    for kind in ("sdpa", huggingface.NAME):
        torch.manual_seed(0)
        kept = copy.deepcopy(config)
        model = transformers.MoonshineForConditionalGeneration._from_config(
            kept, attn_implementation=kind
        ).eval()
        if kind == huggingface.NAME:
            huggingface.set_layout(model, functools.partial(BlockLayout.dense, block=16))
        ids, keep = _tokens()
        given = {"decoder_input_ids": ids, "decoder_attention_mask": keep, "use_cache": False}
        with torch.no_grad():
            found.append(model(input_values=torch.ones(2, 8000), **given)[0][keep.bool()])
    torch.testing.assert_close(*found, **numerics.CHAINED)


def test_a_model_that_would_ignore_its_layout_is_refused() -> None:
    """One with another implementation, and one whose attention transformers cannot replace."""
    with pytest.raises(ArgumentError, match="a OPTForCausalLM with 'sdpa'; accepted: one with"):
        huggingface.set_layout(_make("OPT", "sdpa"), WINDOW)
    model = models.make("Bloom")
    model.set_attn_implementation(huggingface.NAME)  # a line in a log is all that this does
    with pytest.raises(ArgumentError, match="whose attention transformers cannot replace"):
        huggingface.set_layout(model, WINDOW)


def _find_mask_calls() -> dict[str, str]:
    """The sources of attentions of transformers that hand their mask to a method of their own."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text()
        classes = ast.parse(source).body if "ALL_ATTENTION_FUNCTIONS" in source else []
        for kind in (each for each in classes if isinstance(each, ast.ClassDef)):
            methods = [each for each in kind.body if isinstance(each, ast.FunctionDef)]
            for method in methods:
                if method.name != "forward" or "ALL_ATTENTION" not in ast.unparse(method):
                    continue
                calls = [ast.unparse(n) for n in ast.walk(method) if isinstance(n, ast.Call)]
                hands_on = r"self\.(?!_upcast)\w+(\.\w+)?\(.*\battention_mask\b"
                if any(re.match(hands_on, call, re.DOTALL) for call in calls):
                    found[f"{path.parent.name}.{kind.name}"] = ast.unparse(kind)
    return found


def test_attentions_that_choose_keys_by_content_are_known() -> None:
    """Those that make another mask of theirs, in whichever release is installed."""
    found = _find_mask_calls()
    assert len(found) >= 8
    for name, source in found.items():
        known = any(re.search(rf"(self\.|def ){each}\b", source) for each in huggingface._CHOOSERS)
        assert known, name


@pytest.mark.parametrize("name", ["Doge", "DeepseekV32", "AXK2", "DeepseekV4"])
def test_an_attention_that_chooses_keys_by_content_is_refused(name: str) -> None:
    latent = {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
    own = {} if name in ("Doge", "DeepseekV4") else latent
    heads = {"num_key_value_heads": 1 if name == "DeepseekV4" else 4}
    with torch.device("meta"):
        model = models.make(name, "Model", **heads, **own)
        model.config._attn_implementation = huggingface.NAME
    with pytest.raises(ArgumentError, match="chooses keys by content; accepted: one whose"):
        huggingface.set_layout(model, WINDOW)


def test_an_attention_that_indexes_its_mask() -> None:
    """Pix2Struct takes the last of four dimensions of a mask of keys."""
    tokens, keep = _tokens()
    given = {"input_ids": tokens, "attention_mask": keep, "use_cache": False}
    pair = []
    for kind in ("sdpa", huggingface.NAME):
        kind_of = transformers.Pix2StructTextConfig
        config = models.make_config(kind_of, is_decoder=True, dropout_rate=0.0)
        config._attn_implementation, config.initializer_range = kind, 0.02
        torch.manual_seed(0)
        pair.append(transformers.Pix2StructTextModel(config))
    huggingface.set_layout(pair[1], functools.partial(BlockLayout.dense, block=16))
    _assert_alike(pair, [given, given])


def test_a_class_without_a_module_is_no_error() -> None:
    """As one that was made at run time may be."""
    model = _make("OPT", huggingface.NAME)
    model.own = type("Own", (torch.nn.Module,), {"__module__": "nowhere"})()
    huggingface.set_layout(model, WINDOW)


def test_attention_to_an_encoder_has_no_window() -> None:
    """Nor in a pass with a cache, where a decoder's attention to itself has the model's own."""
    module: Any = torch.nn.Module()
    module.is_cross_attention = True
    huggingface.set_layout(module, WINDOW)
    module.torchweld_pass.has_cache = True
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    found, _ = huggingface.attention(module, q, k, v, is_causal=False, sliding_window=4)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


def test_a_model_without_a_layout_says_so() -> None:
    tokens, keep = _tokens()
    with pytest.raises(ArgumentError, match="set_layout"):
        _make("Bert", huggingface.NAME)(tokens)
    _, model = _pair("Bert", WINDOW)
    with pytest.raises(ArgumentError, match="attention_mask"):
        model(tokens, attention_mask=keep[:, None, None].expand(2, 1, LENGTH, LENGTH).bool())


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("room", [None, 29, 64])
@pytest.mark.parametrize("window", [8, 40])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_passes_with_a_cache_are_eagers(
    name: str, window: int, room: int | None, is_padded: bool
) -> None:
    """A prompt, several tokens, one; own windows, caps, sinks; caches that grow or have room."""
    own = {} if name == "Llama" else {"sliding_window": window}
    pair = [_make(name, kind, **own).eval() for kind in ("eager", huggingface.NAME)]
    huggingface.set_layout(pair[1], WINDOW)
    tokens, _ = _tokens()
    keep = torch.ones_like(tokens)
    keep[1, :3] = 0 if is_padded else 1
    logits = []
    for model in pair:
        sizes = {"config": model.config} | ({"max_cache_len": room} if room else {})
        cache = StaticCache(**sizes) if room else DynamicCache(**sizes)
        given = {CACHE: cache, "use_cache": True}
        passes = [
            model(tokens[:, begin:end], attention_mask=keep[:, :end], **given).logits
            for begin, end in ((0, 20), (20, 28), (28, 29))
        ]
        logits.append(torch.cat(passes, 1)[keep[:, :29].bool()])
    torch.testing.assert_close(*logits, **numerics.CHAINED)


def test_t5_in_a_cache_with_room_is_eagers() -> None:
    """The decoder's bias takes the place of a mask, which would have said that it is causal."""
    tokens, _ = _tokens()
    logits = []
    for kind in ("eager", huggingface.NAME):
        model = models.make("T5", "ForConditionalGeneration")
        model.set_attn_implementation(kind)
        if kind == huggingface.NAME:
            huggingface.set_layout(model.decoder, WINDOW)
            huggingface.set_layout(model.encoder, functools.partial(BlockLayout.dense, block=16))
        sizes = {"config": model.config.get_text_config(decoder=True), "max_cache_len": 64}
        cache = EncoderDecoderCache(StaticCache(**sizes), StaticCache(**sizes))
        given = {"input_ids": tokens[:, :64], CACHE: cache, "use_cache": True}
        passes = [
            model.eval()(decoder_input_ids=tokens[:, begin:end], **given).logits
            for begin, end in ((0, 12), (12, 20), (20, 21))
        ]
        logits.append(torch.cat(passes, 1))
    torch.testing.assert_close(*logits, **numerics.CHAINED)


def _positions(*rows: tuple[int, ...]) -> torch.Tensor:
    """Positions that restart at every document of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


@pytest.mark.parametrize("layout", ["dense", "window"])
@pytest.mark.parametrize(
    "position_ids",
    [_positions((40, 56)), _positions((40, 56), (96,)), _positions((10, 30, 56), (57, 39))],
    ids=["for all", "one of two", "different"],
)
def test_packed_sequences(layout: str, position_ids: torch.Tensor) -> None:
    """Restarting positions separate documents, independently in each sequence of the batch."""
    tokens, _ = _tokens()
    make = {"dense": functools.partial(BlockLayout.dense, block=16), "window": WINDOW}[layout]
    plain, sparse = _pair("Llama", make)
    number = (position_ids == 0).cumsum(-1).expand(2, -1)
    seen = (number[:, :, None] == number[:, None]) & make((LENGTH, LENGTH)).to_mask()[0]
    seen = seen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    given = {"input_ids": tokens, "position_ids": position_ids, "use_cache": False}
    _assert_alike([plain, sparse], [{**given, "attention_mask": seen[:, None]}, given])
    if layout == "dense":  # sdpa finds the documents as well
        torch.testing.assert_close(sparse(**given)[0], plain(**given)[0], **numerics.CHAINED)
    # Nothing is left of them in the next pass.
    whole = {"input_ids": tokens, "use_cache": False}
    mask = make((LENGTH, LENGTH)).to_mask() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    wanted = plain(**whole, attention_mask=mask.expand(2, 1, -1, -1))
    torch.testing.assert_close(sparse(**whole)[0], wanted[0], **numerics.CHAINED)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it as it traces
@pytest.mark.parametrize("position_ids", [None, _positions((40, 56))], ids=["one", "packed"])
def test_a_compiled_model(position_ids: torch.Tensor | None) -> None:
    """Tracing, transformers takes every batch for a packed one."""
    torch.compiler.reset()
    tokens, _ = _tokens()
    _, model = _pair("Llama", WINDOW)
    given = {"input_ids": tokens, "position_ids": position_ids, "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(**given)[0], model(**given)[0], **numerics.SUMMED)


def test_packed_sequences_with_padding() -> None:
    """The keys' mask takes part, and so does a sliding window; both in the mask of documents."""
    _, keep = _tokens()
    packed = packed_sequence_mask_function(torch.arange(LENGTH)[None].expand(2, -1) // 40)
    function = and_masks(causal_mask_function, sliding_window_overlay(40), packed)
    found = huggingface.mask(LENGTH, keep, function, q_length=LENGTH)
    expected = (torch.arange(LENGTH) // 40 + 1).expand(2, -1) * keep
    assert torch.equal(found, expected[:, None, None])


def test_other_masks_are_refused() -> None:
    """Prefixes and chunks, also with packed sequences."""
    packed = packed_sequence_mask_function(torch.zeros(1, LENGTH, dtype=torch.int64))
    chunks = chunked_overlay(16, torch.zeros(1, dtype=torch.int64))
    for function in (chunks, and_masks(packed, chunks), and_masks(packed, packed)):
        with pytest.raises(ArgumentError, match="mask_function is one of prefixes"):
            huggingface.mask(LENGTH, None, function, q_length=LENGTH)


def test_a_sliding_window_of_the_models_is_replaced() -> None:
    tokens, _ = _tokens()
    pair = [_make("Gemma2", huggingface.NAME, sliding_window=n).eval() for n in (40, 999)]
    for model in pair:
        huggingface.set_layout(model, functools.partial(BlockLayout.dense, block=16))
    torch.testing.assert_close(*(model(tokens)[0] for model in pair))


def test_arguments_that_change_scores_are_refused() -> None:
    module = torch.nn.Module()
    huggingface.set_layout(module, WINDOW)
    q = torch.randn(1, 2, 64, 8)
    for name in ("indices", "block_indices", "cu_seq_lens_q", "sinks", "output_attentions"):
        with pytest.raises(ArgumentError, match=name):
            huggingface.attention(module, q, q, q, **{name: torch.ones(1)})
