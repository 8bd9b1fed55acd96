"""Passes of `generate` have no layout, however transformers calls them; all others have theirs."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import models
import pytest
import torch
import transformers
from models import CACHE, IS_TESTED_RELEASE
from transformers import DynamicCache

from torchweld import huggingface
from torchweld.sparse import BlockLayout

# A window of 16 tokens in blocks; the models' own are of 4.
WINDOW = functools.partial(BlockLayout.sliding_window, num_sliding_window_blocks=1, block=16)
NAMES = ["Llama", "Mistral", "Gemma2", "Gemma3", "GptOss", "Qwen3", "Bart", "OPT", "GPT2"]
if IS_TESTED_RELEASE:  # `set_layout` refuses T5 of older releases: its attention cannot be replaced
    NAMES.append("T5")
GIVEN: dict[str, Any] = {
    **{"max_new_tokens": 6, "do_sample": False, "output_logits": True},
    **{"return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None},
}
huggingface.register()


def _make(name: str, layout: Any = WINDOW) -> list[Any]:
    """A model with eager attention, and the same one with a layout."""
    model = models.build(name)
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "sliding_window", None):
        text.sliding_window = 4
    pair = []
    for kind in ("eager", huggingface.NAME):
        torch.manual_seed(0)
        made = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=kind)
        with torch.no_grad():
            for key, parameter in made.named_parameters():
                # Attention is then not nearly the mean of all values.
                parameter.mul_(3 if parameter.ndim == 2 and "embed" not in key else 1)
        pair.append(made.eval())
    huggingface.set_layout(pair[1], layout)
    return pair


def _draw(count: int = 40) -> torch.Tensor:
    return torch.randint(3, 128, (2, count), generator=torch.Generator().manual_seed(1))


def _assert_equal_logits(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        size = theirs.abs().max()
        torch.testing.assert_close(mine / size, theirs / size, rtol=0, atol=2e-5)


@pytest.mark.parametrize("uses_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", NAMES)
def test_generated_logits_are_eagers(name: str, uses_cache: bool) -> None:
    """With a cache and without one, and the next pass has the layout again."""
    is_decoder = name not in ("Bart", "T5")
    eager, ours = _make(
        name, WINDOW if is_decoder else functools.partial(BlockLayout.dense, block=16)
    )
    for part in () if is_decoder else (ours.get_decoder(),):
        huggingface.set_layout(part, WINDOW)
    ids = _draw()
    given = {"input_ids": ids} if is_decoder else {"input_ids": ids, "decoder_input_ids": ids}
    with torch.no_grad():
        before = ours(**given, use_cache=False).logits
        own = eager(**given, use_cache=False).logits
    assert (before - own).abs().max() > 1e-2 * own.abs().max()  # the layout is another attention
    _assert_equal_logits(
        *(m.generate(**given, **GIVEN, use_cache=uses_cache) for m in (ours, eager))
    )
    with torch.no_grad():
        assert torch.equal(ours(**given, use_cache=False).logits, before)


@pytest.mark.parametrize("how", [*{"past_key_values": 0, CACHE: 0}, "by position"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_a_cache_is_known_by_its_type(name: str, how: str) -> None:
    """Under the names that it has in any release, and by position."""
    results = []
    for model in _make(name):
        cache = DynamicCache(config=model.config)
        args = [None, None, cache] if how == "by position" else []
        given = {} if args else {how: cache}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            results.append(model(_draw(), *args, **given, use_cache=True).logits)
    size = results[0].abs().max()
    torch.testing.assert_close(results[1] / size, results[0] / size, rtol=0, atol=2e-5)


class _OwnLoop(transformers.MistralForCausalLM):
    """A model with a loop of its own, without a cache."""

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Append the likeliest token, as often as asked."""
        with torch.no_grad():
            for _ in range(options["max_new_tokens"]):
                following = self(ids, use_cache=False).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, following], 1)
        return ids


def test_a_loop_of_the_models_own() -> None:
    eager, ours = _make("Mistral")
    for model in (eager, ours):
        model.__class__ = _OwnLoop
    huggingface.set_layout(ours, WINDOW)
    assert torch.equal(*(m.generate(_draw(), max_new_tokens=12) for m in (eager, ours)))


@pytest.mark.parametrize("uses_cache", [True, False], ids=["cache", "no cache"])
def test_a_part_with_a_layout(uses_cache: bool) -> None:
    """The model that generates is another one than that with the layout."""
    eager, _ = _make("Mistral")
    config = copy.deepcopy(eager.config)
    ours = type(eager)._from_config(config, attn_implementation=huggingface.NAME).eval()
    ours.load_state_dict(eager.state_dict())
    huggingface.set_layout(ours.model, WINDOW)
    _assert_equal_logits(
        *(m.generate(_draw(), **GIVEN, use_cache=uses_cache) for m in (ours, eager))
    )


def test_an_encoders_layout_stays() -> None:
    """Its pass in `generate` is the same as in training."""
    plain, ours = _make("Bart")
    huggingface.set_layout(ours.get_decoder(), functools.partial(BlockLayout.dense, block=16))
    seen: list[torch.Tensor] = []
    ours.get_encoder().register_forward_hook(lambda *given: seen.append(given[2][0]))
    ours.generate(_draw(), **GIVEN)
    with torch.no_grad():
        wanted, other = (m.get_encoder()(_draw())[0] for m in (ours, plain))
    assert torch.equal(seen[0], wanted)
    assert (wanted - other).abs().max() > 1e-2 * other.abs().max()


def test_other_models_passes_meanwhile() -> None:
    """A model that judges tokens while another generates keeps its layout; so after an error."""
    (_, ours), (_, judge) = _make("Mistral"), _make("Mistral")
    with torch.no_grad():
        wanted = judge(_draw(), use_cache=False).logits
    found: list[torch.Tensor] = []

    class Judge(transformers.LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            found.append(judge(_draw(), use_cache=False).logits)
            if len(found) == 3:
                raise RuntimeError("enough")
            return scores

    with pytest.raises(RuntimeError, match="enough"):
        ours.generate(_draw(), **GIVEN, logits_processor=[Judge()])
    assert all(torch.equal(each, wanted) for each in found)
    with torch.no_grad():
        torch.testing.assert_close(ours(_draw(), use_cache=False).logits, wanted)


def test_generate_is_wrapped_once_and_copies_generate() -> None:
    _, ours = _make("Mistral")
    for _ in range(3):
        huggingface.set_layout(ours, WINDOW)
    own = vars(transformers.GenerationMixin)["generate"]
    assert own.__name__ == "generate"
    assert own.__wrapped__ not in huggingface._COUNTED
    assert own in huggingface._COUNTED
    copied = copy.deepcopy(ours)
    _assert_equal_logits(*(m.generate(_draw(), **GIVEN, use_cache=False) for m in (copied, ours)))
    assert copied.torchweld_pass.generating == ours.torchweld_pass.generating == 0
