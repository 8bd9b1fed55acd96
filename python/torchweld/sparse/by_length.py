"""Layouts by length, for modules whose inputs vary in length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import torch

from torchweld import state
from torchweld.errors import ArgumentError
from torchweld.isolate import leave_modes
from torchweld.sparse.layout import BlockLayout
from torchweld.sparse.lists import Lists

# A layout, or a function that makes one from the lengths (queries, keys).
Source = BlockLayout | Callable[[tuple[int, int]], BlockLayout]
_CAPACITY = 16


class Layouts:
    """The layouts of a source: one for each pair of lengths and each device.

    Layers share layouts only if they share a Layouts.
    """

    def __init__(self, source: Source) -> None:
        if not isinstance(source, BlockLayout) and not callable(source):
            accepted = "a BlockLayout, or a function from (queries, keys) to one"
            raise ArgumentError("Layouts", "layout", f"a {type(source).__name__}", accepted)
        self.source = source
        self._made: dict[tuple[int, int, torch.device], BlockLayout] = {}

    def of(self, q: torch.Tensor, k: torch.Tensor) -> BlockLayout:
        """The layout for these queries and keys. Their lengths are the second to last dimension."""
        key = (q.shape[-2], k.shape[-2], q.device)
        if state.is_tracing():  # sizes are tensors
            key = (int(key[0]), int(key[1]), q.device)
        layout = self._made.get(key)
        if layout is None:
            with nullcontext() if state.is_dynamo_compiling() else leave_modes():
                layout = self._make(key[:2]).to(q.device)
            if len(self._made) == _CAPACITY:  # ragged batches have many lengths
                self._made.pop(next(iter(self._made)))
            self._made[key] = layout
        if state.is_fake(q) and layout.lists and not torch.compiler.is_exporting():
            fakes = Lists(*[q.fake_mode.from_tensor(t) for t in layout.lists])
            return dataclasses.replace(layout, lists=fakes)
        return layout

    def _make(self, lengths: tuple[int, int]) -> BlockLayout:
        return self.source if isinstance(self.source, BlockLayout) else self.source(lengths)


DENSE = Layouts(lambda lengths: BlockLayout.dense(lengths))
