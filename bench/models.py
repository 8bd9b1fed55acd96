"""Whole models of transformers, eager, compiled and fused: python -m torchweld.bench.models.

Sixteen architectures at a size that a CPU steps in a second. Contenders take turns, step by step.
--write FILE writes the page of the documentation. With the names of some models it replaces only
their rows, if the page was measured on the same machine and versions.
"""

from __future__ import annotations

import argparse
import copy
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchweld
from torchweld.bench import training
from torchweld.bench.machine import describe_machine
from torchweld.bench.training import Learner
from torchweld.dispatch.engine.store import write_text

WORDS, WIDTH, LAYERS, HEADS = 32000, 256, 2, 4
BATCH, LENGTH = 4, 128
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
_HEAD = {**_GROUPED, "head_dim": WIDTH // HEADS}
_T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
}
_T5 |= {"num_layers": LAYERS, "num_heads": HEADS, "feed_forward_proj": "gated-gelu"}
_OLD: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_positions": LENGTH,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
}
_OPT = {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
_IMAGES = {key: size for key, size in _SIZES.items() if "vocab" not in key and "max" not in key}
_STATE = {"num_heads": 8, "head_dim": WIDTH // 4, "n_groups": 1, "state_size": 32}
_STATE |= {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
_STATE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "chunk_size": 32}
_FINE = {"num_experts": 16, "num_experts_per_tok": 4}
_MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "num_key_value_heads": HEADS, "v_head_dim": 32}
_MLA |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "first_k_dense_replace": 1}
_ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
_SMALL_EXPERTS = {"moe_intermediate_size": WIDTH // 2}

# The name of a configuration, the end of the model's name, and the settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "ForCausalLM", _GROUPED),
    "Qwen3": ("Qwen3", "ForCausalLM", _HEAD),
    "Gemma3": ("Gemma3Text", "ForCausalLM", _HEAD),
    "Mistral": ("Mistral", "ForCausalLM", _GROUPED),
    "Phi3": ("Phi3", "ForCausalLM", _GROUPED),
    "GPT-2": ("GPT2", "LMHeadModel", {**_OLD, "n_head": HEADS}),
    "OPT": ("OPT", "ForCausalLM", {**_SIZES, **_OPT}),
    "BERT": ("Bert", "ForMaskedLM", _SIZES),
    "T5": ("T5", "ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
    "ViT": ("ViT", "ForImageClassification", {**_IMAGES, "image_size": 64, "patch_size": 8}),
    "Mixtral": ("Mixtral", "ForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", "ForCausalLM", {**_HEAD, **_FINE, **_SMALL_EXPERTS}),
    "OLMoE": ("Olmoe", "ForCausalLM", {**_GROUPED, **_FINE, "intermediate_size": WIDTH // 2}),
    "gpt-oss": ("GptOss", "ForCausalLM", {**_HEAD, "num_local_experts": 8, "sliding_window": 64}),
    "DeepSeek-V3": ("DeepseekV3", "ForCausalLM", {**_GROUPED, **_MLA, **_ROUTED, **_SMALL_EXPERTS}),
    "Mamba2": ("Mamba2", "ForCausalLM", _STATE),
}
_PAGE = """# Whole models

Training steps of architectures of transformers, made small: width {width}, {layers} layers,
{words} words, {batch} x {length} tokens, float32, on {machine} ({isa}, {threads} threads), torch
{torch}, transformers {transformers}. This page is measured by
`python -m torchweld.bench.models --write docs/models.md`.
"eager" is the model with torch's fused AdamW, "compiled" the same under torch.compile, "fused"
after `torchweld.fuse` with `torchweld.optim.AdamW`. {times}
The peak is what a step holds beyond parameters, gradients and states; that of compiled code cannot
be counted on a CPU.

{table}

## What was fused, and what was left

{reports}
"""
_TIMED = "The contenders take turns, and the times are medians."
_NOT_TIMED = "This run took no times."


class Row(NamedTuple):
    """What was measured of a model."""

    name: str
    steps: list[dict[str, Any]]
    report: torchweld.fusion.WeldReport


def build(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch."""
    import transformers

    config, kind, settings = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{config}Config")(**settings)
    model = getattr(transformers, f"{config.removesuffix('Text')}{kind}")(made)
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        pixels = torch.randn(BATCH, 3, 64, 64, generator=generator)
        return model, {"pixel_values": pixels, "labels": torch.arange(BATCH) % 2}
    ids = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
    return model, {"input_ids": ids, "labels": ids}


def measure(name: str, seconds: float, compiles: bool) -> Row:
    """Step times and peaks of a model, and what fuse() does to it; with 0 seconds no times."""
    model, batch = build(name)
    model.train()
    fused = torchweld.fuse(copy.deepcopy(model))
    report = torchweld.explain_fusion(fused)
    ways: dict[str, Callable[[], torch.nn.Module]] = {"eager": lambda: model}
    if compiles:
        ways["compiled"] = lambda: training.compiled(copy.deepcopy(model))
    ways["fused"] = lambda: fused
    learners = []
    for way, make in ways.items():
        made = make()
        plain = partial(torch.optim.AdamW, fused=True)
        optimizer = (torchweld.optim.AdamW if way == "fused" else plain)(made.parameters(), 1e-4)
        learners.append(Learner(way, made, optimizer, lambda m, _: m(**batch).loss))
    if seconds:
        return Row(name, training.measure(learners, seconds=seconds / len(learners)), report)
    steps: list[dict[str, Any]] = []
    for learner in learners:
        learner.learn()  # makes the optimizer's states
        steps.append({"contender": learner.name, "peak_bytes": learner.peak_bytes()})
    return Row(name, steps, report)


def write_page(rows: Sequence[Row], transformers: str, before: str = "") -> str:
    """The page of the documentation, with the version of transformers.

    The models that are not in `rows` keep their rows of the page before.
    """
    names = ["eager", "compiled", "fused"]
    timed = any("total" in row.steps[0] for row in rows)
    of_times = [*(f"{name} ms" for name in names), "eager / fused"] if timed else []
    header = ["model", *of_times, "peak MB, eager", "fused"]
    head = [_line(header), "|---|" + "--:|" * (len(header) - 1)]
    lines, reports = _read_page(before)
    for row in rows:
        by_name = {step["contender"]: step for step in row.steps}
        times = [_round(by_name.get(n, {}).get("total")) for n in names]
        gain = by_name["fused"].get("speed_up")
        times.append("" if gain is None else f"{gain:.2f}x")
        peaks = [f"{by_name[n]['peak_bytes'] / 1e6:.0f}" for n in ("eager", "fused")]
        lines[row.name] = _line([row.name, *(times if timed else []), *peaks])
        reports[row.name] = _describe(row)
    named = sorted(lines, key=[*MODELS, *lines].index)
    machine = describe_machine("cpu")
    page = _PAGE.format(
        width=WIDTH,
        layers=LAYERS,
        words=WORDS,
        batch=BATCH,
        length=LENGTH,
        machine=machine["name"],
        isa=machine["isa"],
        threads=machine["threads"],
        torch=torch.__version__.partition("+")[0],
        transformers=transformers,
        times=_TIMED if timed else _NOT_TIMED,
        table="\n".join([*head, *(lines[name] for name in named)]),
        reports="\n".join(reports[name] for name in named),
    )
    if before and before.partition("\n|")[0] != page.partition("\n|")[0]:
        raise ValueError("the page is of another machine or other versions: measure all models")
    return page


def _read_page(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """The line and the report of each model of a page."""
    found = re.finditer(r"^- \*\*(.+?)\*\*:.*(?:\n  - .*)*", page, re.MULTILINE)
    reports = {report[1]: report[0] for report in found}
    starts = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines()}
    return {name: starts[name] for name in reports}, reports


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _describe(row: Row) -> str:
    """One paragraph on what was fused in a model, and what was left."""
    fused: dict[str, int] = {}
    left: dict[str, int] = {}
    for entry in row.report:
        key = f"{entry.what}: {entry.reason}" if entry.reason else entry.becomes
        into = left if entry.reason else fused
        into[key] = into.get(key, 0) + 1
    parts = [
        f"- **{row.name}**: "
        + (", ".join(f"{n} {what}" for what, n in fused.items()) or "nothing")
        + "."
    ]
    parts += [f"  - left: {re.sub('[<>]', '', what)} ({n}x)" for what, n in left.items()]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="model", help=", ".join(MODELS))
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of steps of each model; 0: no times"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    unknown = {*options.names} - {*MODELS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(MODELS)}")
    warnings.simplefilter("ignore")
    keeps = options.write and options.names and options.write.exists()
    before = options.write.read_text() if keeps else ""
    rows = []
    for name in options.names or MODELS:
        rows.append(measure(name, options.seconds, not options.no_compile))
        torch.compiler.reset()
        print(name, rows[-1].steps, flush=True)
        if options.seconds:
            training.table(rows[-1].steps).show()
        if options.write:  # after each, so that an interrupted run leaves what it has
            write_text(options.write, write_page(rows, version("transformers"), before))


if __name__ == "__main__":
    main()
