"""tp_plan and sequence_plan choose the style of each module of a transformer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchweld import nn
from torchweld.distributed.ring.styles import RingAttention, RotaryPositions
from torchweld.distributed.tensor.experts import ExpertsParallel
from torchweld.distributed.tensor.head import HeadParallel, serves
from torchweld.distributed.tensor.packed import (
    PackedColwiseParallel,
    PackedConv1DParallel,
    PackedHeadsParallel,
)
from torchweld.distributed.tensor.replicated import CombinedParallel, ReplicatedParallel
from torchweld.distributed.tensor.styles import (
    ActivationParallel,
    DropoutParallel,
    FusedColwiseParallel,
    FusedRowwiseParallel,
    GatherInput,
    ResidualNormParallel,
    SequenceParallelRegion,
    Style,
    VocabularyParallel,
    get_head_width,
    get_norm_name,
    is_transposed,
)
from torchweld.distributed.tensor.sums import Sums
from torchweld.distributed.tensor.trial import try_plan
from torchweld.errors import ArgumentError
from torchweld.fusion.experts import find_form, looks_stacked
from torchweld.fusion.graph.alone import Known
from torchweld.fusion.graph.mlp import GatedMLP, read_gated_mlp
from torchweld.ops.experts.grouped import Form

Plan = dict[str, ParallelStyle]
_Styles = dict[str, Style]

_ON_ROWS = (
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    nn.DropoutAddLayerNorm,
    nn.DropoutAddRMSNorm,
    nn.BiasDropoutAdd,
)
_ON_HEADS = (nn.BlockSparseAttention, nn.SoftmaxDropout)
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def tp_plan(model: torch.nn.Module, sequence_parallel: bool = False, *, ring: bool = False) -> Plan:
    """Make a tensor-parallel plan for `torch.distributed.tensor.parallel.parallelize_module`.

    The names of layers identify transformers made of torchweld.nn's modules, and GPT-2, Llama,
    BERT, OPT, T5, Phi3, ViT and StableLM of transformers, also after `torchweld.fuse`. Each block
    has two all-reduces in the forward and two in the backward pass; `sequence_parallel` replaces
    each by an all-gather and a reduce-scatter. Stacked experts, of `nn.ExpertsMLP` and of
    transformers' mixtures, are shared among devices, and so are the words of the embedding and the
    head unless both are one tensor. Other modules have whole parameters on each device; these
    become DTensors too.

    Args:
        model: a whole model, or a stage of a pipeline. Its blocks are in a ModuleList or
            ModuleDict. Heads, key heads, the features between the layers of an MLP and experts are
            multiples of the number of devices.
        sequence_parallel: shard the sequence in norms, dropouts, additions and all else in the
            blocks. Lengths must be multiples of the number of devices.
        ring: make the plan for a mesh of two dimensions, ring and tensor. The model's inputs are
            the device's slice of the tokens along the ring, and their positions. Every attention is
            a BlockSparseAttention: each device has some of its heads, and exchanges keys and values
            along the ring. After a backward pass gradients are summed over the ring; see `no_sync`.

    Returns:
        A dict from names of modules to styles.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    blocks = list(_find_blocks(model))
    if not blocks:
        accepted = "a transformer whose attention has q_proj, query or c_attn layers"
        raise ArgumentError("tp_plan", "model", f"a {type(model).__name__} without one", accepted)
    sharing = _find_sequence_parallel_blocks(model, blocks) if sequence_parallel else ()
    inside = tuple(f"{name}." for name in sharing)
    modules = dict(model.named_modules())
    heads = tuple(f"{name}." for name, module in modules.items() if _find_projections(module))
    _check_attention(modules)
    _check_mixing("tp_plan", {n: m for n, m in modules.items() if n.startswith(inside)}, heads)
    styles: _Styles = {}
    known = Known()
    for block in blocks:
        for inner, style in _plan_block(modules[block], stream, known):
            styles.setdefault(f"{block}.{inner}".strip("."), style)
    within = tuple(f"{name}." for name in blocks)
    for name, style in _plan_outside_blocks(model).items():
        if not name.startswith(within):
            styles[name] = style

    def place_grads(name: str) -> Placement:
        partial = name in sharing or name.startswith((*inside, *heads))
        return Partial() if partial else Replicate()

    rest = _replicate_unplaced(model, styles, place_grads)
    if sequence_parallel:
        for name, module in modules.items():  # among them attention's, whose weights have heads
            if isinstance(module, torch.nn.Dropout) and name.startswith(inside):
                styles.setdefault(name, DropoutParallel(1))
        for name in {blocks[0], blocks[-1]}:
            styles[name] = SequenceParallelRegion(name == blocks[0], name == blocks[-1])
    if ring:
        _check_rings("tp_plan", modules)
        _plan_ring(modules, styles)
    trial = partial(try_plan, model, lambda part: tp_plan(part, sequence_parallel))
    return _make_plan(model, styles, rest, ring, [] if ring else [trial])


def sequence_plan(model: torch.nn.Module) -> Plan:
    """Make a plan that shards the sequence over devices and replicates every parameter.

    The model's inputs are the device's slice of the tokens, and their positions. Every attention is
    a BlockSparseAttention, which runs as a ring. After a backward pass gradients are
    summed over devices; see `no_sync`.

    Args:
        model: any model whose other modules work on rows.

    Returns:
        A dict from names of modules to styles, for `parallelize_module`.
    """
    modules = dict(model.named_modules())
    _check_rings("sequence_plan", modules)
    _check_mixing("sequence_plan", modules, ())
    styles: _Styles = {}
    for name, module in modules.items():
        if isinstance(module, nn.BlockSparseAttention):
            styles[name] = RingAttention()
        elif isinstance(module, nn.RotaryEmbedding):
            styles[name] = RotaryPositions()
        elif isinstance(module, torch.nn.Dropout):
            styles[name] = DropoutParallel(1)
        elif isinstance(module, _ON_ROWS):
            styles[name] = ActivationParallel(Shard(1))
    return _make_plan(model, styles, _replicate_unplaced(model, styles, lambda _: Partial()))


def _make_plan(
    model: torch.nn.Module,
    known: _Styles,
    rest: _Styles,
    ring: bool = False,
    trials: Sequence[Callable[[int], None]] = (),
) -> Plan:
    """Merge both; a module can have a style and also parameters that no style places."""
    merged = dict(known)
    for name, style in rest.items():
        merged[name] = CombinedParallel((style, known[name])) if name in known else style
    checks: list[Callable[[int], None]] = [
        partial(style.check, name, model.get_submodule(name)) for name, style in merged.items()
    ]
    checks += trials
    sums = Sums()
    for style in merged.values():
        style.ring, style.checks, style.sums = ring, checks, sums
    return dict(merged)


def _plan_ring(modules: dict[str, torch.nn.Module], styles: _Styles) -> None:
    """Add ring attention, and dropout on a slice of the sequence, to a tensor-parallel plan."""
    for name, module in modules.items():
        if isinstance(module, nn.BlockSparseAttention):
            styles[name] = RingAttention(heads=True)
        elif isinstance(module, nn.RotaryEmbedding):
            styles[name] = RotaryPositions()
        elif isinstance(module, torch.nn.Dropout):
            styles.setdefault(name, DropoutParallel(1, along=1))


def _find_blocks(model: torch.nn.Module) -> Iterator[str]:
    """Find the names of the blocks with attention, in order."""
    for name, module in model.named_modules():
        if isinstance(module, _LISTS):
            for key, child in module.named_children():
                if _has_attention(child):
                    yield f"{name}.{key}".strip(".")


def _find_sequence_parallel_blocks(model: torch.nn.Module, blocks: list[str]) -> tuple[str, ...]:
    """Find the items of the list of blocks, from the first to the last with attention."""
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) > 1:
        actual, accepted = f"one with blocks in {', '.join(sorted(lists))}", "one list of blocks"
        raise ArgumentError("tp_plan", "model", actual, f"{accepted} for sequence_parallel")
    name = lists.pop()
    items = [f"{name}.{key}".strip(".") for key, _ in model.get_submodule(name).named_children()]
    return tuple(items[items.index(blocks[0]) : items.index(blocks[-1]) + 1])


# --- Modules that no recipe knows -----------------------------------------------------------------


def _replicate_unplaced(
    model: torch.nn.Module, styles: _Styles, grads: Callable[[str], Placement]
) -> _Styles:
    """Make styles for the modules whose parameters no other style places."""
    placed = {name for name, style in styles.items() if isinstance(style, _PLACES)}
    for name, style in styles.items():
        if isinstance(style, (PackedColwiseParallel, PackedConv1DParallel)):
            placed.add(f"{name}.{style.name}")
        if isinstance(style, ResidualNormParallel):
            placed.add(f"{name}.{get_norm_name(model.get_submodule(name))}")
    replicated: _Styles = {}

    def visit(name: str, module: torch.nn.Module, is_inner: bool) -> None:
        within = f"{name}." if name else ""
        is_known = any(other.startswith(within) for other in placed)
        # A module may read its submodules' parameters, unless a style places one of them.
        reads = not (is_inner or is_known or isinstance(module, _LISTS))
        names = [own for own, _ in module.named_parameters(recurse=reads)]
        if names and name not in placed:
            replicated[name] = ReplicatedParallel(grads(name), names)
        for key, child in module.named_children():
            visit(f"{within}{key}", child, is_inner or reads)

    visit("", model, is_inner=False)
    return replicated


def _find_owners(module: torch.nn.Module) -> set[str]:
    """Find the names of submodules, or of the module itself (""), with parameters of their own."""
    return {name.rpartition(".")[0] for name, _ in module.named_parameters()}


def _check_attention(modules: dict[str, torch.nn.Module]) -> None:
    """Check that recipes know every part of an attention, so that all parts have the same heads."""
    for name, module in modules.items():
        if not (names := _find_projections(module)):
            continue
        parent = modules.get(name.rpartition(".")[0])
        siblings = _get_children(parent) if parent is not None and name.endswith(".self") else {}
        own = any(name in _find_owners(module) for name in _OUTPUTS)
        if not (own or hasattr(siblings.get("output"), "dense")):
            accepted = f"one with {' or '.join(_OUTPUTS)}, or BERT's output.dense"
            raise ArgumentError("tp_plan", "model", f"without an output layer in {name}", accepted)
        width = get_head_width(module)
        for inner in sorted(_find_owners(module) - {*names, *_OUTPUTS}):
            part = module.get_submodule(inner)
            sizes = {p.numel() for p in part.parameters(recurse=False)}
            # A norm of each head, the same for all heads.
            is_norm = inner in _get_children(module) and sizes == {width}
            if not (is_norm or inner == _BIAS or isinstance(part, _ON_HEADS)):
                actual = f"with a {type(part).__name__} in attention: {name}.{inner}".rstrip(".")
                accepted = "projections, an output layer, and norms of single heads (head_dim)"
                raise ArgumentError("tp_plan", "model", actual, accepted)


def _check_rings(function: str, modules: dict[str, torch.nn.Module]) -> None:
    """Check that every attention is a BlockSparseAttention, which ring attention requires."""
    for name, module in modules.items():
        word = type(module).__name__.lower()
        is_attention = _find_projections(module) or any(
            part in word for part in ("attention", "attn")
        )
        rings = any(isinstance(part, nn.BlockSparseAttention) for part in module.modules())
        if is_attention and not rings:
            actual, accepted = f"whose {name} has none", "with a BlockSparseAttention in each"
            raise ArgumentError(function, "model", actual, f"{accepted} attention")


def _check_mixing(
    function: str, modules: dict[str, torch.nn.Module], heads: tuple[str, ...]
) -> None:
    """Check that modules on a part of the sequence do not need another part."""
    for name, module in modules.items():
        if isinstance(module, _MIXES) and not name.startswith(heads):
            actual = f"with a {type(module).__name__}, {name}, on a part of the sequence"
            raise ArgumentError(function, "model", actual, "modules that work on rows")


# Modules whose results for a token depend on other tokens.
_MIXES = (
    torch.nn.MultiheadAttention,
    torch.nn.RNNBase,
    torch.nn.modules.conv._ConvNd,
    torch.nn.modules.batchnorm._BatchNorm,
)
_PLACES = (
    ActivationParallel,
    ExpertsParallel,
    FusedColwiseParallel,
    FusedRowwiseParallel,
    HeadParallel,
    VocabularyParallel,
)


# --- Recipes: from a module to the names inside it and their styles -------------------------------


def _get_children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return dict(module.named_children())


_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_OUTPUTS = ("o_proj", "c_proj", "out_proj", "o")
_BIAS = "relative_attention_bias"  # T5's, an embedding with a column for each head
# Attention with a qkv_proj, whose order of features is known.
_KNOWN_PACKED = ("Phi3Attention",)


def _find_projections(module: torch.nn.Module) -> tuple[str, ...]:
    """Find the names of the projections, if the module is an attention."""
    children = _get_children(module)
    for names in (*_PROJECTIONS, ("c_attn",)):
        if all(name in children for name in names):
            return names
    if hasattr(module, "n_heads") and children.keys() >= {"q", "k", "v", "o"}:  # T5
        return ("q", "k", "v")
    return ("qkv_proj",) if type(module).__name__ in _KNOWN_PACKED else ()


_Recipe = Iterator[tuple[str, Style]]


def _plan_block(block: torch.nn.Module, stream: Placement, known: Known) -> _Recipe:
    modules = dict(block.named_modules())
    heads = tuple(f"{name}." for name, module in modules.items() if _find_projections(module))
    for name, module in modules.items():
        if name.startswith(heads):
            continue
        recipes: list[Callable[..., _Recipe]] = [_plan_attention, _plan_bert_layer]
        recipes.append(partial(_plan_experts, known))
        # A mixture's experts that are modules of their own are left whole: devices would have
        # different rows.
        if _is_only_one(modules, name):
            recipes.append(partial(_plan_mlp, known))
        if "." not in name or isinstance(module, _ON_ROWS[2:]):
            recipes.append(_plan_norm)
        for recipe in recipes:
            for inner, style in recipe(module, stream):
                yield f"{name}.{inner}".strip("."), style


def _is_only_one(modules: dict[str, torch.nn.Module], name: str) -> bool:
    """Whether the modules around a module, within a block, have no other layers except norms.

    A list of a block's halves, as in T5, does not count as around them.
    """
    parts = name.split(".")
    around = [modules[".".join(parts[:i])] for i in range(1, len(parts))]
    halves = [each for each in around if isinstance(each, _LISTS) and _has_attention(each)]
    own = {*modules[name].parameters()}
    others = {p for each in around if each not in halves for p in each.parameters()} - own
    return all(p.ndim == 1 for p in others)


def _has_attention(module: torch.nn.Module) -> bool:
    return any(_find_projections(part) for part in module.modules())


def _plan_attention(module: torch.nn.Module, stream: Placement) -> _Recipe:
    names, children = _find_projections(module), _get_children(module)
    if not names:
        return
    if names == ("c_attn",):
        yield "", PackedConv1DParallel(stream)
    elif names == ("qkv_proj",):
        yield "", _make_packed_heads(module, stream)
    else:
        yield "", GatherInput(stream, projections=names)
        yield from ((name, FusedColwiseParallel()) for name in names)
    for name, child in children.items():
        if name == _BIAS:
            yield name, FusedColwiseParallel()
        elif isinstance(child, _ON_HEADS):
            yield name, ActivationParallel(Shard(1))
        elif name in _OUTPUTS:
            yield name, FusedRowwiseParallel(output_layouts=stream)


def _make_packed_heads(module: Any, stream: Placement) -> Style:
    heads, key_heads = module.config.num_attention_heads, module.num_key_value_heads
    parts = [each * module.head_dim for each in (heads, key_heads, key_heads)]
    return PackedHeadsParallel(stream, "qkv_proj", parts)


def _plan_mlp(known: Known, module: torch.nn.Module, stream: Placement) -> _Recipe:
    gated = known.find(_find_gated, module)
    if gated is None:
        pass
    elif gated.up is None and _is_mlp(module, (gated.gate, gated.down)):
        features = getattr(module, gated.gate).weight.shape[0] // 2
        yield "", PackedColwiseParallel(stream, gated.gate, [features, features])
        yield gated.down, FusedRowwiseParallel(output_layouts=stream)
    elif gated.up is not None and _is_mlp(module, (gated.gate, gated.up, gated.down)):
        yield "", GatherInput(stream, "x")
        yield from ((name, FusedColwiseParallel()) for name in (gated.gate, gated.up))
        yield gated.down, FusedRowwiseParallel(output_layouts=stream)
        if gated.dropout is not None:
            yield gated.dropout, DropoutParallel(-1)  # drops hidden features
    for first, second in (("fc1", "fc2"), ("c_fc", "c_proj"), ("wi", "wo")):
        if _is_mlp(module, (first, second)):
            yield first, FusedColwiseParallel(input_layouts=stream)
            yield second, FusedRowwiseParallel(output_layouts=stream)
            if first == "wi" and "dropout" in _get_children(module):  # T5 drops hidden features
                yield "dropout", DropoutParallel(-1)


def _find_gated(module: torch.nn.Module) -> GatedMLP | None:
    """The parts of a gated MLP: by their usual names, else by what the module computes."""
    usual = GatedMLP("gate_proj", "up_proj", "down_proj")
    if _get_children(module).keys() >= {usual.gate, usual.up, usual.down}:
        return usual
    found = read_gated_mlp(module)
    return None if found is None else found[0]


def _is_mlp(module: torch.nn.Module, names: tuple[str, ...]) -> bool:
    """Whether the module has these layers, and nothing with parameters between them."""
    if not _get_children(module).keys() >= {*names}:
        return False
    first: Any = module.get_submodule(names[0])
    hidden = first.weight.shape[1 if is_transposed(first) else 0]
    attention = tuple(name for name, child in module.named_modules() if _find_projections(child))
    others = [name for name in _find_owners(module) - {*names} if not name.startswith(attention)]
    sizes = {
        p.numel() for name in others for p in module.get_submodule(name).parameters(recurse=False)
    }
    # An MLP's layers can be children of the block itself, next to the stream's norms.
    return not sizes & {1, hidden} if attention else not others


def _plan_experts(known: Known, module: torch.nn.Module, stream: Placement) -> _Recipe:
    if isinstance(module, nn.ExpertsMLP):
        yield "", ExpertsParallel(stream)
    elif looks_stacked(module) and isinstance(form := known.find(find_form, module), Form):
        yield "", ExpertsParallel(stream, form)


def _plan_bert_layer(module: torch.nn.Module, stream: Placement) -> _Recipe:
    """Plan a half of a BERT layer, which ends in a dense layer, a dropout, residual and norm."""
    children = _get_children(module)
    if children.keys() >= {"self", "output"} or children.keys() >= {"intermediate", "output"}:
        if "intermediate" in children:
            yield "intermediate.dense", FusedColwiseParallel(input_layouts=stream)
        yield "output", ResidualNormParallel(stream)
        yield "output.dense", FusedRowwiseParallel(output_layouts=stream, use_local_output=False)


def _plan_norm(module: torch.nn.Module, stream: Placement) -> _Recipe:
    if isinstance(module, _ON_ROWS) or type(module).__name__.endswith("RMSNorm"):
        yield "", ActivationParallel(stream)


# --- Before the first block and after the last one ------------------------------------------------


def _plan_outside_blocks(model: torch.nn.Module) -> _Styles:
    """Plan modules outside blocks; shard vocabularies unless embedding and head share a tensor."""
    styles: _Styles = {}
    for name, module in model.named_modules():
        if isinstance(module, _ON_ROWS):
            styles[name] = ActivationParallel(Replicate())
    losses = [pair for pair in model.named_modules() if isinstance(pair[1], nn.LinearCrossEntropy)]
    tokens = _find_tokens(model)
    if tokens is not None:
        users = [m for m in model.modules() if getattr(m, "weight", None) is tokens[1].weight]
        # A head that computes the loss has the shards of the embedding.
        if any(user not in (tokens[1], *(head for _, head in losses)) for user in users):
            return styles
        styles[tokens[0]] = FusedRowwiseParallel(input_layouts=Replicate())
    styles.update((name, VocabularyParallel()) for name, _ in losses)
    for name, module in model.named_children():
        if name in styles:
            continue
        if name in ("head", "lm_head") and serves(module):
            styles[name] = HeadParallel()
        elif name in ("head", "lm_head") and isinstance(module, torch.nn.Linear):
            styles[name] = FusedColwiseParallel(output_layouts=Replicate())
    return styles


def _find_tokens(model: torch.nn.Module) -> tuple[str, torch.nn.Embedding] | None:
    """The tokens' embedding: that which the model names as transformers do, or the largest."""
    found = [pair for pair in model.named_modules() if isinstance(pair[1], torch.nn.Embedding)]
    named: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        named = model.get_input_embeddings()  # type: ignore[operator]
    largest = max(found, key=lambda pair: pair[1].num_embeddings, default=None)
    return next((pair for pair in found if pair[1] is named), largest)
