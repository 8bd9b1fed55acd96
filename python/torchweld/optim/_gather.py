"""Sorts parameters and their states into the batches that step together.

`Gathering.add` sorts parameters by `Kind`: one shape, dtype and device. `Kind.gather` then appends
the parameters of a kind, with their gradients and states, to a `BatchBuilder`. Kinds that differ
only in their shape share a builder, and `Gathering.batches` finishes all builders.

A model has hundreds of parameters but few kinds, and every step gathers all of them. So the loop in
`Gathering.add` does little per parameter, and facts about a kind are looked up once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Batch, Tensors, is_foreign_to_kernels
from torchweld.optim import _rounding_offsets, _sharded_blocks, _shards
from torchweld.optim._codecs import STEP, Codec, Entries, Moments, State
from torchweld.optim._shards import is_dtensor, local_part, sharing_key


class BatchBuilder:
    """A batch in progress, and a list of tensors for each entry of its parameters' states."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.lists: dict[str, Tensors] = {name: [] for name in entries.all()}
        masters = self.lists[entries.master] if entries.master else []
        companions = self.lists[entries.companion] if entries.companion else []
        self.batch = Batch(steps=self.lists[STEP], masters=masters, companions=companions)

    def finish(self) -> Batch:
        """Complete the batch, after all kinds were added."""
        batch = self.batch
        batch.moments = [t for name in self.entries.moments for t in self.lists[name]]
        batch.absmaxes = [t for name in self.entries.absmaxes for t in self.lists[name]]
        if batch.splits:
            self._split_absmaxes()
        return batch

    def _split_absmaxes(self) -> None:
        """Pass each piece of a block the absmax of its block: rows are split across devices."""
        batch = self.batch
        batch.edges = [split.edges for split in batch.splits]
        batch.block_absmaxes = batch.absmaxes
        splits = batch.splits * len(self.entries.absmaxes)
        pairs = zip(splits, batch.block_absmaxes, strict=True)
        batch.absmaxes = [split.of_pieces(absmax) for split, absmax in pairs]
        # A skipped step writes no new absmax, so these begin as the old ones.
        batch.new_absmaxes = [absmax.clone() for absmax in batch.absmaxes]


class Kind:
    """Parameters of one shape, dtype and device, and the facts that they share."""

    def __init__(
        self, p: torch.Tensor, codec: Codec, moments: Moments, builder: BatchBuilder
    ) -> None:
        self.params: Tensors = []
        self.grads: Tensors = []
        self.numbers: list[int] = []  # of the parameters; only for stochastic rounding
        self.lrs: list[float] = []  # of the parameters; only if groups have different ones
        self.groups: list[dict[str, Any]] = []  # the same for other settings
        self.moments, self.entries = moments, builder.lists.keys()
        self._device, self._shape = p.device, p.shape
        self.is_complex, self.is_shared = p.is_complex(), is_dtensor(p)
        self.rounds = codec.rounds(p)
        self.has_sparse = False
        self._is_plain = not self.is_shared and not self.is_complex
        self._is_sharded = _shards.is_sharded(p)
        self._split = _sharded_blocks.split_rows(p) if builder.entries.absmaxes else None
        self._batch, self._lists = builder.batch, builder.lists
        own = [moment for moment in moments.values() if not moment.is_companion]
        shapes = [p.shape if moment.shape is None else moment.shape for moment in own]
        self._moment_shapes = dict(zip(builder.entries.moments, shapes, strict=True))
        if builder.entries.companion:
            self._moment_shapes[builder.entries.companion] = p.shape

    @property
    def is_split(self) -> bool:
        """Whether its rows are split across devices."""
        return self._split is not None

    def read_entries(self, states: list[State]) -> dict[str, Tensors] | None:
        """Return a list of tensors for each entry of these states; None if a state lacks one."""
        lists = {name: [state[name] for state in states if name in state] for name in self.entries}
        is_complete = all(len(tensors) == len(states) for tensors in lists.values())
        return lists if is_complete else None

    def gather(self, function: str, states: list[State], lists: dict[str, Tensors]) -> None:
        """Append all parameters to the batch; `lists` has the entries of their states."""
        # Kernels count steps on their device, but torch may load the counts on the CPU.
        for i, step in enumerate(lists[STEP]):
            if step.device != self._device:
                states[i][STEP] = lists[STEP][i] = step.to(self._device)
        for name, shape in self._moment_shapes.items():
            self._check_shapes(function, shape, lists[name])
        batch = self._batch
        batch.wholes += self.params
        batch.params += self._local_parts(self.params)
        keeps_grads = self._is_plain and not self.has_sparse
        batch.grads += self.grads if keeps_grads else map(to_dense_part, self.grads)
        batch.lrs += self.lrs
        batch.groups += self.groups
        for name, tensors in lists.items():
            self._lists[name] += self._local_parts(tensors)
        batch.is_sharded |= self._is_sharded
        if self._split is not None:
            batch.splits += [self._split] * len(self.params)
        if self.rounds:
            offsets = map(_rounding_offsets.find_offset, self.params, self.numbers)
            batch.rounding_offsets += offsets

    def _local_parts(self, tensors: Tensors) -> Iterable[torch.Tensor]:
        return tensors if self._is_plain else map(to_real_part, tensors)

    def _check_shapes(self, function: str, expected: torch.Size, tensors: Tensors) -> None:
        shapes = [t.shape for t in tensors]
        if shapes != [expected] * len(tensors):
            wrong = next(shape for shape in shapes if shape != expected)
            accepted = f"of shape {list(wrong)}, as its state is"
            raise ArgumentError(function, "a parameter", f"of {list(self._shape)}", accepted)


class Gathering:
    """The parameters of groups with equal settings, sorted by kind.

    Each batch has parameters of one device, dtype and codec.
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
        # The learning rate of the first group; once another group differs, kinds list all rates.
        self._lr: float | torch.Tensor | None = None
        self._lists_lrs = False
        self._kinds: dict[Any, Kind] = {}
        self._builders: dict[Any, BatchBuilder] = {}

    def add(
        self,
        numbered: Iterable[tuple[int, torch.Tensor]],
        lr: float | torch.Tensor,
        group: dict[str, Any] | None = None,
    ) -> None:
        """Add the parameters that have a gradient, each with its number in the optimizer.

        `group`: theirs, if the settings of groups may differ. Raises ArgumentError if one of the
        parameters cannot be stepped.
        """
        if self._lr is None:
            self._lr = lr
        elif lr is not self._lr and lr != self._lr and not self._lists_lrs:
            self._lists_lrs = True
            for earlier in self._kinds.values():
                earlier.lrs = [self._lr] * len(earlier.params)  # type: ignore[list-item]
        # This loop runs for every parameter at every step: locals are faster than attributes.
        kinds, strided, lists_lrs = self._kinds, torch.strided, self._lists_lrs
        kind: Kind | None
        for number, p in numbered:
            grad = p.grad
            if grad is None:
                continue
            cls = type(p)
            is_plain = cls is torch.nn.Parameter or cls is torch.Tensor
            key = (p.shape, p.dtype, grad.dtype, p.device if is_plain else _storage_key(p))
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = self._new_kind(p)
            if grad.layout is not strided or kind.is_shared:
                self._check_gradient(kind, p, grad)
            kind.params.append(p)
            kind.grads.append(grad)
            if kind.rounds:
                kind.numbers.append(number)
            if lists_lrs:
                kind.lrs.append(lr)  # type: ignore[arg-type]
            if group is not None:
                kind.groups.append(group)

    def kinds(self) -> Iterable[Kind]:
        """All kinds, in the order of their first parameters."""
        return self._kinds.values()

    def batches(self) -> list[Batch]:
        """Finish the batches, after all kinds were gathered."""
        batches = [builder.finish() for builder in self._builders.values()]
        for batch in batches:
            batch.lr = batch.lrs or self._lr
        return batches

    def _new_kind(self, p: torch.Tensor) -> Kind:
        """Create the kind of p, and a builder if no other kind has the same one."""
        moments = self._moments(p)
        entries = self.codec.entries(p, moments)
        if self.codec.stochastic_rounding:
            _rounding_offsets.check_dtype(self.function, p)
        is_split = bool(entries.absmaxes) and _sharded_blocks.split_rows(p) is not None
        is_foreign = is_foreign_to_kernels(local_part(p))
        if is_foreign and (entries.absmaxes or entries.master or self.codec.rounds(p)):
            actual = f"a {type(local_part(p)).__name__}"
            accepted = "a torch.Tensor, or the parameter's own storage and states that are no codes"
            raise ArgumentError(self.function, "a parameter", actual, accepted)
        assert p.grad is not None
        key = (p.device, p.dtype, p.grad.dtype, entries, is_split, is_foreign)
        if key not in self._builders:
            self._builders[key] = BatchBuilder(entries)
        return Kind(p, self.codec, moments, self._builders[key])

    def _check_gradient(self, kind: Kind, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Check a gradient that is sparse or a DTensor."""
        if grad.layout is not torch.strided and not self._takes_sparse:
            actual = f"a {str(grad.layout).removeprefix('torch.')} tensor"
            raise ArgumentError(self.function, "a gradient", actual, "a dense tensor")
        if not kind.is_shared:
            kind.has_sparse = True
            return
        _shards.check_gradient(self.function, p)
        if kind.is_split:
            _sharded_blocks.check_blocks(self.function, p)
        if kind.rounds:
            _rounding_offsets.check_part(self.function, p)


def _storage_key(p: torch.Tensor) -> object:
    """A key that parameters of subclasses share if they are stored alike."""
    return (type(p), sharing_key(p), type(local_part(p.detach())))


def to_real_part(t: torch.Tensor) -> torch.Tensor:
    """Return the local part, as real numbers."""
    return torch.view_as_real(local_part(t)) if t.is_complex() else local_part(t)


def to_dense_part(grad: torch.Tensor) -> torch.Tensor:
    """Return the local part of a gradient as dense real numbers without pending operations."""
    grad = local_part(grad)
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    return to_real_part(dense.resolve_conj().resolve_neg())
