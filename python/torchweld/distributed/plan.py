"""tp_plan: which style of tensor parallelism each module of a fused transformer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchweld import nn
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
)
from torchweld.errors import ArgumentError

Plan = dict[str, ParallelStyle]

_ON_ROWS = (
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    nn.DropoutAddLayerNorm,
    nn.DropoutAddRMSNorm,
    nn.BiasDropoutAdd,
)
_ON_HEADS = (nn.BlockSparseAttention, nn.SoftmaxDropout)


def tp_plan(model: torch.nn.Module, sequence_parallel: bool = False, *, ring: bool = False) -> Plan:
    """A plan for `torch.distributed.tensor.parallel.parallelize_module`.

    It recognises, from the names of layers, transformers made of torchweld.nn's modules, and GPT-2,
    Llama and BERT of transformers after `torchweld.fuse`. Each block has two all-reduces in the
    forward and two in the backward; `sequence_parallel` replaces each by an all-gather and a
    reduce-scatter.

    Args:
        model: a whole model, or a stage of a pipeline. Its blocks are in a ModuleList or
            ModuleDict.
        sequence_parallel: shard the sequence in norms, dropouts and additions. Lengths must be
            multiples of the number of devices.
        ring: the plan is for a mesh of two dimensions, ring and tensor. The model's inputs are the
            device's slice of the tokens along the ring, and their positions. Every attention is a
            BlockSparseAttention: each device has some heads of it, and their keys and values travel
            along the ring. Gradients are summed over the ring after each backward.

    Returns:
        A dict from names of modules to styles.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    found: Plan = {}
    blocks = list(_blocks(model))
    if not blocks:
        accepted = "a transformer whose attention has q_proj, query or c_attn layers"
        raise ArgumentError("tp_plan", "model", f"a {type(model).__name__} without one", accepted)
    for name, module in model.named_modules():
        for recipe in _RECIPES:
            for inner, style in recipe(module, stream):
                found.setdefault(f"{name}.{inner}".strip("."), style)
    within = tuple(f"{name}." for name in blocks)
    for name, style in _around(model).items():
        if not name.startswith(within):
            found[name] = style
    if sequence_parallel:
        # Includes dropout of attention's weights, which are sharded by heads.
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout) and name.startswith(within):
                found[name] = Dropped(1)
        for name in {blocks[0], blocks[-1]}:
            found[name] = Stream(name == blocks[0], name == blocks[-1])
    return _along_a_ring(model, found) if ring else found


def _along_a_ring(model: torch.nn.Module, found: Plan) -> Plan:
    """The plan for ring and tensor: attention round the ring, and every parameter on both."""
    for name, module in model.named_modules():
        rings = any(isinstance(child, nn.BlockSparseAttention) for child in module.children())
        if _attention(module) and not rings:
            came, accepted = f"whose {name} has none", "with a BlockSparseAttention in each"
            raise ArgumentError("tp_plan", "model", came, f"{accepted} attention")
        if isinstance(module, nn.BlockSparseAttention):
            found[name] = RingAttention(heads=True)
        elif isinstance(module, torch.nn.Dropout):
            found.setdefault(name, Dropped(1, along=1))
        elif next(module.parameters(recurse=False), None) is not None:
            found.setdefault(name, Rows(Replicate()))
    for style in found.values():
        assert isinstance(style, Style)
        style.ring = True
    return found


def sequence_plan(model: torch.nn.Module) -> Plan:
    """A plan that shards the sequence over devices and replicates every parameter.

    The model's inputs are the device's slice of the tokens, and their positions.
    BlockSparseAttention runs as a ring. Gradients are summed over devices after each backward.

    Args:
        model: any model whose other modules work on rows.

    Returns:
        A dict from names of modules to styles, for `parallelize_module`.
    """
    found: Plan = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BlockSparseAttention):
            found[name] = RingAttention()
        elif isinstance(module, torch.nn.Dropout):
            found[name] = Dropped(1)
        elif (
            isinstance(module, _ON_ROWS) or next(module.parameters(recurse=False), None) is not None
        ):
            found[name] = Rows(Shard(1))
    return found


def _blocks(model: torch.nn.Module) -> Iterator[str]:
    """Names of the blocks with attention, in order."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            for key, child in module.named_children():
                if any(_attention(part) for part in child.modules()):
                    yield f"{name}.{key}"


# --- Recipes: from a module to the names inside it and their styles -------------------------------


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return dict(module.named_children())


_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


def _attention(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of its projections, if it is one."""
    children = _children(module)
    for names in (*_PROJECTIONS, ("c_attn",)):
        if all(name in children for name in names):
            return names
    return ()


def _of_attention(module: torch.nn.Module, stream: Placement) -> Iterator[tuple[str, Any]]:
    names, children = _attention(module), _children(module)
    if not names:
        return
    if names == ("c_attn",):
        yield "", Packed(stream)
    else:
        yield "", Gather(stream)
        yield from ((name, Columns()) for name in names)
    for name, child in children.items():
        if isinstance(child, _ON_HEADS):
            yield name, Rows(Shard(1))
        elif name in ("o_proj", "c_proj"):
            yield name, ColumnsOfRows(output_layouts=stream)


def _of_mlp(module: torch.nn.Module, stream: Placement) -> Iterator[tuple[str, Any]]:
    names = _children(module).keys()
    if names >= {"gate_proj", "up_proj", "down_proj"}:
        yield "", Gather(stream, "x")
        yield from (("gate_proj", Columns()), ("up_proj", Columns()))
        yield "down_proj", ColumnsOfRows(output_layouts=stream)
    for first, second in (("fc1", "fc2"), ("c_fc", "c_proj")):
        if names >= {first, second}:
            yield first, Columns(input_layouts=stream)
            yield second, ColumnsOfRows(output_layouts=stream)


def _of_bert(module: torch.nn.Module, stream: Placement) -> Iterator[tuple[str, Any]]:
    """Both halves of a layer end in a dense layer, a dropout, the residual and a norm."""
    children = _children(module)
    if children.keys() >= {"self", "output"} or children.keys() >= {"intermediate", "output"}:
        if "intermediate" in children:
            yield "intermediate.dense", Columns(input_layouts=stream)
        yield "output", AddedAndNormalized(stream)
        yield "output.dense", ColumnsOfRows(output_layouts=stream, use_local_output=False)


def _of_rows(module: torch.nn.Module, stream: Placement) -> Iterator[tuple[str, Any]]:
    if isinstance(module, _ON_ROWS) or type(module).__name__.endswith("RMSNorm"):
        yield "", Rows(stream)


_Recipe = Callable[[torch.nn.Module, Placement], Iterator[tuple[str, Any]]]
_RECIPES: tuple[_Recipe, ...] = (_of_attention, _of_mlp, _of_bert, _of_rows)


# --- Before the first block and after the last one ------------------------------------------------


def _around(model: torch.nn.Module) -> Plan:
    """Modules outside blocks; vocabularies are sharded unless embedding and head share a tensor."""
    found: Plan = {}
    for name, module in model.named_modules():
        for inner, _ in _of_rows(module, Replicate()):
            found[f"{name}.{inner}".strip(".")] = Rows(Replicate())
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
