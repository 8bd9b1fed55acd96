"""tp_plan and sequence_plan: which style each module of a transformer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchweld import nn
from torchweld.distributed.held import Held, Together
from torchweld.distributed.ring import RingAttention
from torchweld.distributed.styles import (
    AddedAndNormalized,
    Columns,
    ColumnsOfRows,
    Dropped,
    Gather,
    Packed,
    Rows,
    Stream,
    Style,
    head_width,
    is_transposed,
    norm_of,
)
from torchweld.errors import ArgumentError

Plan = dict[str, ParallelStyle]
_Found = dict[str, Style]

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
    """A plan for `torch.distributed.tensor.parallel.parallelize_module`.

    It recognises, from the names of layers, transformers made of torchweld.nn's modules, and GPT-2,
    Llama and BERT of transformers after `torchweld.fuse`. Each block has two all-reduces in the
    forward and two in the backward; `sequence_parallel` replaces each by an all-gather and a
    reduce-scatter. Other modules have whole parameters on each device, which become DTensors too.

    Args:
        model: a whole model, or a stage of a pipeline. Its blocks are in a ModuleList or
            ModuleDict. Heads, key heads and the features between the layers of an MLP are multiples
            of the number of devices.
        sequence_parallel: shard the sequence in norms, dropouts, additions and what else is in the
            blocks. Lengths must be multiples of the number of devices.
        ring: the plan is for a mesh of two dimensions, ring and tensor. The model's inputs are the
            device's slice of the tokens along the ring, and their positions. Every attention is a
            BlockSparseAttention: each device has some heads of it, and their keys and values travel
            along the ring. Gradients are summed over the ring after each backward.

    Returns:
        A dict from names of modules to styles.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    blocks = list(_blocks(model))
    if not blocks:
        accepted = "a transformer whose attention has q_proj, query or c_attn layers"
        raise ArgumentError("tp_plan", "model", f"a {type(model).__name__} without one", accepted)
    sharing = _sharing(model, blocks) if sequence_parallel else ()
    inside = tuple(f"{name}." for name in sharing)
    modules = dict(model.named_modules())
    heads = tuple(f"{name}." for name, module in modules.items() if _attention(module))
    _check_attention(modules)
    _check_mixing("tp_plan", {n: m for n, m in modules.items() if n.startswith(inside)}, heads)
    found: _Found = {}
    for block in blocks:
        for inner, style in _of_block(modules[block], stream):
            found.setdefault(f"{block}.{inner}".strip("."), style)
    within = tuple(f"{name}." for name in blocks)
    for name, style in _around(model).items():
        if not name.startswith(within):
            found[name] = style

    def grads(name: str) -> Placement:
        partial = name in sharing or name.startswith((*inside, *heads))
        return Partial() if partial else Replicate()

    held = _held(model, found, grads)
    if sequence_parallel:
        # Includes dropout of attention's weights, which are sharded by heads.
        for name, module in modules.items():
            if isinstance(module, torch.nn.Dropout) and name.startswith(inside):
                found[name] = Dropped(1)
        for name in {blocks[0], blocks[-1]}:
            found[name] = Stream(name == blocks[0], name == blocks[-1])
    if ring:
        _check_rings("tp_plan", modules)
        _send_round_a_ring(modules, found)
    return _planned(model, found, held, ring)


def sequence_plan(model: torch.nn.Module) -> Plan:
    """A plan that shards the sequence over devices and replicates every parameter.

    The model's inputs are the device's slice of the tokens, and their positions. Every attention is
    a BlockSparseAttention, which runs as a ring. Gradients are summed over devices after each
    backward.

    Args:
        model: any model whose other modules work on rows.

    Returns:
        A dict from names of modules to styles, for `parallelize_module`.
    """
    modules = dict(model.named_modules())
    _check_rings("sequence_plan", modules)
    _check_mixing("sequence_plan", modules, ())
    found: _Found = {}
    for name, module in modules.items():
        if isinstance(module, nn.BlockSparseAttention):
            found[name] = RingAttention()
        elif isinstance(module, torch.nn.Dropout):
            found[name] = Dropped(1)
        elif isinstance(module, _ON_ROWS):
            found[name] = Rows(Shard(1))
    return _planned(model, found, _held(model, found, lambda _: Partial()))


def _planned(model: torch.nn.Module, found: _Found, held: _Found, ring: bool = False) -> Plan:
    """The plan of both; a module can have a style, and parameters of its own that none knows."""
    styles = dict(found)
    for name, style in held.items():
        styles[name] = Together((style, found[name])) if name in found else style
    plan = [(name, model.get_submodule(name), style) for name, style in styles.items()]
    for _, _, style in plan:
        style.ring, style.plan = ring, plan
    return dict(styles)


def _send_round_a_ring(modules: dict[str, torch.nn.Module], found: _Found) -> None:
    """For a ring and tensors: attention round the ring, dropout of a slice of the sequence."""
    for name, module in modules.items():
        if isinstance(module, nn.BlockSparseAttention):
            found[name] = RingAttention(heads=True)
        elif isinstance(module, torch.nn.Dropout):
            found.setdefault(name, Dropped(1, along=1))


def _blocks(model: torch.nn.Module) -> Iterator[str]:
    """Names of the blocks with attention, in order."""
    for name, module in model.named_modules():
        if isinstance(module, _LISTS):
            for key, child in module.named_children():
                if any(_attention(part) for part in child.modules()):
                    yield f"{name}.{key}"


def _sharing(model: torch.nn.Module, blocks: list[str]) -> tuple[str, ...]:
    """The items of the list of blocks from the first with attention to the last with it."""
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) > 1:
        came, accepted = f"one with blocks in {', '.join(sorted(lists))}", "one list of blocks"
        raise ArgumentError("tp_plan", "model", came, f"{accepted} for sequence_parallel")
    name = lists.pop()
    items = [f"{name}.{key}" for key, _ in model.get_submodule(name).named_children()]
    return tuple(items[items.index(blocks[0]) : items.index(blocks[-1]) + 1])


# --- What no recipe knows -------------------------------------------------------------------------


def _held(model: torch.nn.Module, found: _Found, grads: Callable[[str], Placement]) -> _Found:
    """Styles for the modules whose parameters no other style places."""
    placed = {name for name, style in found.items() if isinstance(style, _PLACES)}
    for name, style in found.items():
        if isinstance(style, Packed):
            placed.add(f"{name}.c_attn")
        if isinstance(style, AddedAndNormalized):
            placed.add(f"{name}.{norm_of(model.get_submodule(name))}")
    held: _Found = {}

    def hold(name: str, module: torch.nn.Module, is_inner: bool) -> None:
        within = f"{name}." if name else ""
        is_known = any(other.startswith(within) for other in placed)
        # A module may read the parameters of those inside, unless a style places one of them.
        reads = not (is_inner or is_known or isinstance(module, _LISTS))
        names = [own for own, _ in module.named_parameters(recurse=reads)]
        if names and name not in placed:
            held[name] = Held(grads(name), names)
        for key, child in module.named_children():
            hold(f"{within}{key}", child, is_inner or reads)

    hold("", model, is_inner=False)
    return held


def _owns(module: torch.nn.Module) -> set[str]:
    """The names of the modules inside, or of itself (""), with parameters of their own."""
    return {name.rpartition(".")[0] for name, _ in module.named_parameters()}


def _check_attention(modules: dict[str, torch.nn.Module]) -> None:
    """Check that each attention is known as a whole: then a device has heads of all of it."""
    for name, module in modules.items():
        if not (names := _attention(module)):
            continue
        parent = modules.get(name.rpartition(".")[0])
        its = _children(parent) if parent is not None and name.endswith(".self") else {}
        own = any(name in _owns(module) for name in _OUTPUTS)
        if not (own or hasattr(its.get("output"), "dense")):
            accepted = f"one with {' or '.join(_OUTPUTS)}, or BERT's output.dense"
            raise ArgumentError("tp_plan", "model", f"without an output layer in {name}", accepted)
        width = head_width(module)
        for inner in sorted(_owns(module) - {*names, *_OUTPUTS}):
            part = module.get_submodule(inner)
            sizes = {p.numel() for p in part.parameters(recurse=False)}
            # A norm of each head, the same for all heads.
            is_norm = inner in _children(module) and sizes == {width}
            if not (is_norm or isinstance(part, _ON_HEADS)):
                came = f"with a {type(part).__name__} in attention: {name}.{inner}".rstrip(".")
                accepted = "projections, an output layer, and norms of single heads (head_dim)"
                raise ArgumentError("tp_plan", "model", came, accepted)


def _check_rings(function: str, modules: dict[str, torch.nn.Module]) -> None:
    """Check that all attention is one that can go round a ring."""
    for name, module in modules.items():
        word = type(module).__name__.lower()
        is_one = _attention(module) or any(part in word for part in ("attention", "attn"))
        rings = any(isinstance(part, nn.BlockSparseAttention) for part in module.modules())
        if is_one and not rings:
            came, accepted = f"whose {name} has none", "with a BlockSparseAttention in each"
            raise ArgumentError(function, "model", came, f"{accepted} attention")


def _check_mixing(
    function: str, modules: dict[str, torch.nn.Module], heads: tuple[str, ...]
) -> None:
    """Check that modules on a part of the sequence need no other part of it."""
    for name, module in modules.items():
        if isinstance(module, _MIXES) and not name.startswith(heads):
            came = f"with a {type(module).__name__}, {name}, on a part of the sequence"
            raise ArgumentError(function, "model", came, "modules that work on rows")


# Modules whose results for a token depend on other tokens.
_MIXES = (
    torch.nn.MultiheadAttention,
    torch.nn.RNNBase,
    torch.nn.modules.conv._ConvNd,
    torch.nn.modules.batchnorm._BatchNorm,
)
_PLACES = (Rows, Columns, ColumnsOfRows)


# --- Recipes: from a module to the names inside it and their styles -------------------------------


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return dict(module.named_children())


_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_OUTPUTS = ("o_proj", "c_proj")


def _attention(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of its projections, if it is one."""
    children = _children(module)
    for names in (*_PROJECTIONS, ("c_attn",)):
        if all(name in children for name in names):
            return names
    return ()


_Styles = Iterator[tuple[str, Style]]


def _of_block(block: torch.nn.Module, stream: Placement) -> _Styles:
    modules = dict(block.named_modules())
    heads = tuple(f"{name}." for name, module in modules.items() if _attention(module))
    for name, module in modules.items():
        if name.startswith(heads):
            continue
        recipes = [_of_attention, _of_bert]
        # In a mixture of experts devices would have different rows.
        if _is_only_one(modules, name):
            recipes.append(_of_mlp)
        if "." not in name or isinstance(module, _ON_ROWS[2:]):
            recipes.append(_of_rows)
        for recipe in recipes:
            for inner, style in recipe(module, stream):
                yield f"{name}.{inner}".strip("."), style


def _is_only_one(modules: dict[str, torch.nn.Module], name: str) -> bool:
    """Whether the modules around it, within a block, have no other parameters."""
    parts = name.split(".")
    around = [modules[".".join(parts[:i])] for i in range(1, len(parts))]
    own = {*modules[name].parameters()}
    return all(own >= {*each.parameters()} for each in around)


def _of_attention(module: torch.nn.Module, stream: Placement) -> _Styles:
    names, children = _attention(module), _children(module)
    if not names:
        return
    if names == ("c_attn",):
        yield "", Packed(stream)
    else:
        yield "", Gather(stream, projections=names)
        yield from ((name, Columns()) for name in names)
    for name, child in children.items():
        if isinstance(child, _ON_HEADS):
            yield name, Rows(Shard(1))
        elif name in _OUTPUTS:
            yield name, ColumnsOfRows(output_layouts=stream)


def _of_mlp(module: torch.nn.Module, stream: Placement) -> _Styles:
    gated = ("gate_proj", "up_proj", "down_proj")
    if _is_mlp(module, gated):
        yield "", Gather(stream, "x")
        yield from ((name, Columns()) for name in gated[:2])
        yield gated[2], ColumnsOfRows(output_layouts=stream)
    for first, second in (("fc1", "fc2"), ("c_fc", "c_proj")):
        if _is_mlp(module, (first, second)):
            yield first, Columns(input_layouts=stream)
            yield second, ColumnsOfRows(output_layouts=stream)


def _is_mlp(module: torch.nn.Module, names: tuple[str, ...]) -> bool:
    """Whether it has these layers, and nothing between them that has parameters."""
    if not _children(module).keys() >= {*names}:
        return False
    first: Any = module.get_submodule(names[0])
    hidden = first.weight.shape[1 if is_transposed(first) else 0]
    attention = tuple(name for name, child in module.named_modules() if _attention(child))
    others = [name for name in _owns(module) - {*names} if not name.startswith(attention)]
    sizes = {
        p.numel() for name in others for p in module.get_submodule(name).parameters(recurse=False)
    }
    # The layers of an MLP can stand in a block itself, beside norms of the stream.
    return not sizes & {1, hidden} if attention else not others


def _of_bert(module: torch.nn.Module, stream: Placement) -> _Styles:
    """Both halves of a layer end in a dense layer, a dropout, the residual and a norm."""
    children = _children(module)
    if children.keys() >= {"self", "output"} or children.keys() >= {"intermediate", "output"}:
        if "intermediate" in children:
            yield "intermediate.dense", Columns(input_layouts=stream)
        yield "output", AddedAndNormalized(stream)
        yield "output.dense", ColumnsOfRows(output_layouts=stream, use_local_output=False)


def _of_rows(module: torch.nn.Module, stream: Placement) -> _Styles:
    if isinstance(module, _ON_ROWS) or type(module).__name__.endswith("RMSNorm"):
        yield "", Rows(stream)


# --- Before the first block and after the last one ------------------------------------------------


def _around(model: torch.nn.Module) -> _Found:
    """Modules outside blocks; vocabularies are sharded unless embedding and head share a tensor."""
    found: _Found = {}
    for name, module in model.named_modules():
        if isinstance(module, _ON_ROWS):
            found[name] = Rows(Replicate())
    embeddings = [pair for pair in model.named_modules() if isinstance(pair[1], torch.nn.Embedding)]
    tokens = max(embeddings, key=lambda pair: pair[1].num_embeddings, default=None)
    if tokens is not None:
        users = [m for m in model.modules() if getattr(m, "weight", None) is tokens[1].weight]
        if len(users) > 1:
            return found
        found[tokens[0]] = ColumnsOfRows(input_layouts=Replicate())
    for name, module in model.named_children():
        if name in ("head", "lm_head") and isinstance(module, torch.nn.Linear):
            found[name] = Columns(output_layouts=Replicate())
    return found
