"""Which parameters step together, with which entries of their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Batch, Tensors, is_foreign_to_kernels
from torchweld.optim import _rounding_offsets, _sharded_blocks, _shards
from torchweld.optim._codecs import STEP, Codec, Entries, Moments, State
from torchweld.optim._shards import is_one, layout, local


class _Columns:
    """A batch, with its lists keyed by entries of the state."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.of: dict[str, Tensors] = {name: [] for name in entries.all()}
        masters = self.of[entries.master] if entries.master else []
        self.batch = Batch(steps=self.of[STEP], masters=masters)

    def filled(self) -> Batch:
        batch = self.batch
        batch.moments = [t for name in self.entries.moments for t in self.of[name]]
        batch.absmaxes = [t for name in self.entries.absmaxes for t in self.of[name]]
        if batch.splits:
            batch.edges = [split.edges for split in batch.splits]
            batch.block_absmaxes = batch.absmaxes
            splits = batch.splits * len(self.entries.absmaxes)
            of_blocks = list(zip(splits, batch.absmaxes, strict=True))
            batch.absmaxes = [split.of_pieces(absmax) for split, absmax in of_blocks]
            # As they are, for a step that is left out.
            batch.new_absmaxes = [absmax.clone() for absmax in batch.absmaxes]
        return batch


class Kind:
    """Parameters of one shape, dtype and device, which a step treats alike."""

    def __init__(self, p: torch.Tensor, codec: Codec, moments: Moments, columns: _Columns) -> None:
        self.params: Tensors = []
        self.grads: Tensors = []
        self.numbers: list[int] = []  # only for stochastic rounding
        self.lrs: list[float] = []  # only if they differ
        self.moments, self.entries = moments, columns.of.keys()
        self._device, self._shape = p.device, p.shape
        self.is_complex, self.is_shared = p.is_complex(), is_one(p)
        self.rounds = codec.rounds(p)
        self.has_sparse = False
        self._is_plain = not self.is_shared and not self.is_complex
        self._is_sharded = _shards.is_sharded(p)
        self._split = _sharded_blocks.split_rows(p) if columns.entries.absmaxes else None
        self._batch, self._columns = columns.batch, columns.of
        shapes = [p.shape if moment.shape is None else moment.shape for moment in moments.values()]
        self._shapes = dict(zip(columns.entries.moments, shapes, strict=True))

    @property
    def is_split(self) -> bool:
        """Whether its rows are split across devices."""
        return self._split is not None

    def lacks_entries(self, state: State) -> bool:
        """Whether a state lacks an entry that the step needs."""
        return not self.entries <= state.keys()

    def columns_of(self, states: list[State]) -> dict[str, Tensors] | None:
        """The entries that the step needs, from all states; None if a state lacks one."""
        columns = {
            name: [state[name] for state in states if name in state] for name in self.entries
        }
        complete = all(len(column) == len(states) for column in columns.values())
        return columns if complete else None

    def gather(self, function: str, states: list[State], columns: dict[str, Tensors]) -> None:
        """Add all parameters and these entries of their states to their batch."""
        # Counts are on the step's device, so that nothing waits; torch may save them on the CPU.
        for at, step in enumerate(columns[STEP]):
            if step.device != self._device:
                states[at][STEP] = columns[STEP][at] = step.to(self._device)
        for name, shape in self._shapes.items():
            self._check_shapes(function, shape, columns[name])
        batch = self._batch
        batch.wholes += self.params
        batch.params += self._parts(self.params)
        as_they_are = self._is_plain and not self.has_sparse
        batch.grads += self.grads if as_they_are else map(gradient, self.grads)
        batch.lrs += self.lrs
        for name, values in columns.items():
            self._columns[name] += self._parts(values)
        batch.is_sharded |= self._is_sharded
        if self._split is not None:
            batch.splits += [self._split] * len(self.params)
        if self.rounds:
            offsets = map(_rounding_offsets.offset_of, self.params, self.numbers)
            batch.rounding_offsets += offsets

    def _parts(self, tensors: Tensors) -> Iterable[torch.Tensor]:
        return tensors if self._is_plain else map(real, tensors)

    def _check_shapes(self, function: str, shape: torch.Size, values: Tensors) -> None:
        found = [value.shape for value in values]
        if found != [shape] * len(values):
            other = next(came for came in found if came != shape)
            accepted = f"of shape {list(other)}, as its state is"
            raise ArgumentError(function, "a parameter", f"of {list(self._shape)}", accepted)


class Gathering:
    """Parameters of groups with equal settings, by kind, then in batches by device, dtype, codec.

    A model has hundreds of parameters of a few kinds. A kind's common facts are looked up once.
    """

    def __init__(
        self,
        function: str,
        group: dict[str, Any],
        codec: Codec,
        moments: Callable[[torch.Tensor], Moments],
        takes_sparse: bool,
    ) -> None:
        self.function, self.group, self.codec = function, group, codec
        self._moments, self._takes_sparse = moments, takes_sparse
        self._lr: float | torch.Tensor | None = None
        self._has_lrs = False
        self._kinds: dict[Any, Kind] = {}
        self._columns: dict[Any, _Columns] = {}

    def add(self, params: list[torch.Tensor], first_number: int, lr: float | torch.Tensor) -> None:
        """Add those with a gradient; the first one is the optimizer's parameter of this number.

        Raises ArgumentError where one of them cannot be stepped.
        """
        if self._lr is None:
            self._lr = lr
        elif lr is not self._lr and lr != self._lr and not self._has_lrs:
            self._has_lrs = True
            for earlier in self._kinds.values():
                earlier.lrs = [self._lr] * len(earlier.params)  # type: ignore[list-item]
        kinds, strided, has_lrs = self._kinds, torch.strided, self._has_lrs
        kind: Kind | None
        for number, p in enumerate(params, first_number):
            grad = p.grad
            if grad is None:
                continue
            of = type(p)
            is_plain = of is torch.nn.Parameter or of is torch.Tensor
            key = (p.shape, p.dtype, grad.dtype, p.device if is_plain else _sort(p))
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = self._new_kind(p)
            if grad.layout is not strided or kind.is_shared:
                self._check(kind, p, grad)
            kind.params.append(p)
            kind.grads.append(grad)
            if kind.rounds:
                kind.numbers.append(number)
            if has_lrs:
                kind.lrs.append(lr)  # type: ignore[arg-type]

    def kinds(self) -> Iterable[Kind]:
        return self._kinds.values()

    def batches(self) -> list[Batch]:
        """Build the batches once all kinds are gathered."""
        batches = [columns.filled() for columns in self._columns.values()]
        for batch in batches:
            batch.lr = batch.lrs or self._lr
        return batches

    def _new_kind(self, p: torch.Tensor) -> Kind:
        moments = self._moments(p)
        entries = self.codec.entries(p, moments)
        if self.codec.stochastic_rounding:
            _rounding_offsets.check_dtype(self.function, p)
        is_split = bool(entries.absmaxes) and _sharded_blocks.split_rows(p) is not None
        is_foreign = is_foreign_to_kernels(local(p))
        if is_foreign and (entries.absmaxes or entries.master or self.codec.rounds(p)):
            came = f"a {type(local(p)).__name__}"
            accepted = "a torch.Tensor, or the parameter's own storage and states that are no codes"
            raise ArgumentError(self.function, "a parameter", came, accepted)
        assert p.grad is not None
        key = (p.device, p.dtype, p.grad.dtype, entries, is_split, is_foreign)
        if key not in self._columns:
            self._columns[key] = _Columns(entries)
        return Kind(p, self.codec, moments, self._columns[key])

    def _check(self, kind: Kind, p: torch.Tensor, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided and not self._takes_sparse:
            came = f"a {str(grad.layout).removeprefix('torch.')} tensor"
            raise ArgumentError(self.function, "a gradient", came, "a dense tensor")
        if not kind.is_shared:
            kind.has_sparse = True
            return
        _shards.check_gradient(self.function, p)
        if kind.is_split:
            _sharded_blocks.check_blocks(self.function, p)
        if kind.rounds:
            _rounding_offsets.check_part(self.function, p)


def _sort(p: torch.Tensor) -> object:
    """A key that parameters of subclasses share if they are stored alike."""
    return (type(p), layout(p), type(local(p.detach())))


def real(t: torch.Tensor) -> torch.Tensor:
    """The local part, as real numbers."""
    return torch.view_as_real(local(t)) if t.is_complex() else local(t)


def gradient(g: torch.Tensor) -> torch.Tensor:
    """The local part of a gradient, as real numbers: dense, with no pending operations."""
    g = local(g)
    dense = g if g.layout is torch.strided else g.to_dense()
    return real(dense.resolve_conj().resolve_neg())
