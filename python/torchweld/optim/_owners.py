"""Whole matrices of sharded parameters: each is sent to the device that owns it, and back.

Owners are balanced by the operations of their matrices. A matrix that one device holds as a whole,
as in a stack that is sharded along its first dimension, stays there. One all-to-all sends all other
matrices of a bucket, packed together, to their owners, and a second one returns them. An owner
holds at least its share of a matrix, so that W devices together send at most 2 (W - 1) / W of the
matrices' bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchweld.collectives.runs import divide_into_runs
from torchweld.dispatch.dtensor import find_indices
from torchweld.ops.optimizer.passes import Part
from torchweld.optim._matrices import (
    Iteration,
    Matrix,
    MatrixPlace,
    find_iteration,
    find_regions,
    orthogonalize_all,
)
from torchweld.optim._params import Group
from torchweld.optim._shards import find_split_dims

# Elements of the matrices that are sent together.
_BUCKET = 2**26
Index = tuple[Any, Any]  # of rows and columns: slices, or tensors that broadcast


class MatrixPiece(NamedTuple):
    """The piece of a matrix that a device holds."""

    place: tuple[int, ...]  # in the local stack
    here: Index  # in the local matrix of the stack
    there: Index  # in the whole matrix
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.shape[0] * self.shape[1]


class ShardedMatrix(NamedTuple):
    """A matrix of a sharded parameter, with the piece that each device of its group holds."""

    number: int  # of the part
    region: MatrixPlace
    iteration: Iteration
    pieces: tuple[MatrixPiece, ...]

    def count_elements(self) -> int:
        """Count the elements of the whole matrix."""
        return self.region.shape[0] * self.region.shape[1]

    def find_holder(self) -> int | None:
        """Find the device that holds the whole matrix; None if it is cut."""
        whole = self.count_elements()
        return next((rank for rank, p in enumerate(self.pieces) if p.size == whole), None)

    @property
    def cost(self) -> float:
        """The operations of its orthogonalisation."""
        return self.iteration.cost(*self.region.shape)


class _View(NamedTuple):
    """Rows and columns of a matrix, which need not be adjacent."""

    tensor: torch.Tensor
    at: Index
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def read(self) -> torch.Tensor:
        return self.tensor[self.at]

    def write(self, values: torch.Tensor) -> None:
        self.tensor[self.at] = values.view(self.shape)


class Owners:
    """Orthogonalises the matrices of a step, each on one of the devices that hold its pieces."""

    def __init__(self) -> None:
        # The bytes that this device has sent to others.
        self.sent = 0

    def orthogonalize(self, function: str, parts: Sequence[tuple[Part, Group]]) -> None:
        """Overwrite the matrices of all parts."""
        here: list[Matrix] = []
        shared: dict[Any, list[tuple[Part, Group]]] = {}
        iterations = {id(group): find_iteration(function, group) for _, group in parts}
        for part, group in parts:
            iteration, p = iterations[id(group)], part.param
            if along := find_split_dims(p, range(p.ndim)):
                key = (p.device_mesh, along, part.here.dtype)  # type: ignore[attr-defined]
                shared.setdefault(key, []).append((part, group))
                continue
            regions = find_regions(function, p.shape, group)
            here += [Matrix(region.of(part.here), iteration) for region in regions]
        orthogonalize_all(here)
        for (mesh, along, _), some in shared.items():
            self._share(function, mesh, along, some, iterations)

    def _share(
        self,
        function: str,
        mesh: Any,
        along: tuple[int, ...],
        parts: Sequence[tuple[Part, Group]],
        iterations: dict[int, Iteration],
    ) -> None:
        group, coordinates = _find_group(mesh, along, dist.group.WORLD)
        tensors = [part.here for part, _ in parts]
        jobs: list[ShardedMatrix] = []
        for number, (part, settings) in enumerate(parts):
            p = part.param
            held = _find_held(p.shape, mesh, p.placements, coordinates)  # type: ignore[attr-defined]
            for region in find_regions(function, p.shape, settings):
                if 0 in region.shape:
                    continue
                pieces = tuple(_find_piece(region, of_rank) for of_rank in held)
                jobs.append(ShardedMatrix(number, region, iterations[id(settings)], pieces))
        for bucket in divide_into_runs(jobs, ShardedMatrix.count_elements, _BUCKET):
            self._exchange_bucket(bucket, _choose_owners(bucket, len(coordinates)), tensors, group)

    def _exchange_bucket(
        self,
        jobs: Sequence[ShardedMatrix],
        owners: Sequence[int],
        tensors: Sequence[torch.Tensor],
        group: Any,
    ) -> None:
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        own = [job for job, owner in zip(jobs, owners, strict=True) if owner == rank]
        wholes = [tensors[job.number].new_empty(job.region.shape) for job in own]
        # The pieces to send to each owner and to receive from each holder, in the order of jobs.
        out: list[list[_View]] = [[] for _ in range(count)]
        back: list[list[_View]] = [[] for _ in range(count)]
        for job, owner in zip(jobs, owners, strict=True):
            piece = job.pieces[rank]
            if piece.size:
                local = tensors[job.number][piece.place]
                out[owner].append(_View(local, piece.here, piece.shape))
        for job, whole in zip(own, wholes, strict=True):
            for holder, piece in enumerate(job.pieces):
                if piece.size:
                    back[holder].append(_View(whole, piece.there, piece.shape))
        is_any_cut = any(job.find_holder() is None for job in jobs)
        like = tensors[jobs[0].number] if is_any_cut else None
        self._send(out, back, group, rank, like)
        orthogonalize_all(
            Matrix(whole, job.iteration) for job, whole in zip(own, wholes, strict=True)
        )
        self._send(back, out, group, rank, like)

    def _send(
        self,
        sources: Sequence[Sequence[_View]],
        targets: Sequence[Sequence[_View]],
        group: Any,
        rank: int,
        like: torch.Tensor | None,
    ) -> None:
        """Send each device its `sources`; write what each device sends into its `targets`.

        This device's own views are copied here. `like` has the dtype and device of the messages;
        None: no device sends any.
        """
        for from_, to in zip(sources[rank], targets[rank], strict=True):
            to.write(from_.read())
        if like is None:
            return
        sizes = [sum(v.size for v in views) * (i != rank) for i, views in enumerate(sources)]
        room = [sum(v.size for v in views) * (i != rank) for i, views in enumerate(targets)]
        sending = [
            v.read().flatten() for i, views in enumerate(sources) if i != rank for v in views
        ]
        packed = torch.cat(sending) if sending else like.new_empty(0)
        received = like.new_empty(sum(room))
        dist.all_to_all_single(received, packed, room, sizes, group=group)
        self.sent += packed.numel() * packed.element_size()
        arrived = [v for i, views in enumerate(targets) if i != rank for v in views]
        for view, values in zip(arrived, received.split([v.size for v in arrived]), strict=True):
            view.write(values)


@functools.lru_cache(maxsize=64)
def _find_group(
    mesh: Any, along: tuple[int, ...], world: Any
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """Find the devices that share parameters split along these dimensions, and their places.

    `world`, the default group, is part of the cache key: a mesh compares equal to the same mesh of
    an earlier default group.
    """
    if len(along) == 1:
        group = mesh.get_group(along[0])
    else:
        mine = mesh.get_coordinate()
        at = tuple(slice(None) if dim in along else mine[dim] for dim in range(mesh.ndim))
        ranks = sorted(mesh.mesh[at].flatten().tolist())
        is_all = len(ranks) == dist.get_world_size()
        group = world if is_all else dist.new_group(ranks, use_local_synchronization=True)
    ranks = dist.get_process_group_ranks(group)
    coordinates = [tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in ranks]
    return group, tuple(coordinates)


@functools.lru_cache(maxsize=4096)
def _find_held(
    shape: torch.Size,
    mesh: Any,
    placements: tuple[Any, ...],
    coordinates: tuple[tuple[int, ...], ...],
) -> list[tuple[torch.Tensor, ...]]:
    """Find, for each device and dimension, the indices of the elements that it holds."""
    dims = range(len(shape))
    return [
        tuple(find_indices(shape, mesh, placements, dim, coordinate) for dim in dims)
        for coordinate in coordinates
    ]


def _find_piece(region: MatrixPlace, held: tuple[torch.Tensor, ...]) -> MatrixPiece:
    """Find the piece of a matrix on a device that holds these indices."""
    *stack, rows, columns = held
    place: list[int] = []
    for wanted, of_dim in zip(region.place, stack, strict=True):
        positions = (of_dim == wanted).nonzero().flatten().tolist()
        if not positions:
            return MatrixPiece((), (slice(0), slice(0)), (slice(0), slice(0)), (0, 0))
        place.append(positions[0])
    here_rows, there_rows = _meet(rows, region.rows)
    here_columns, there_columns = _meet(columns, region.columns)
    shape = (len(here_rows), len(here_columns))
    here, there = _index(here_rows, here_columns), _index(there_rows, there_columns)
    return MatrixPiece(tuple(place), here, there, shape)


def _meet(held: torch.Tensor, wanted: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Intersect the indices held with a range; return their positions in both."""
    here = ((held >= wanted[0]) & (held < wanted[1])).nonzero().flatten()
    return here, held[here] - wanted[0]


def _index(rows: torch.Tensor, columns: torch.Tensor) -> Index:
    ranges = [_as_slice(rows), _as_slice(columns)]
    if None in ranges:
        return rows.unsqueeze(1), columns.unsqueeze(0)
    return ranges[0], ranges[1]


def _as_slice(positions: torch.Tensor) -> slice | None:
    """Return the positions as a slice; None if they are not adjacent."""
    if len(positions) == 0:
        return slice(0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else None


def _choose_owners(jobs: Sequence[ShardedMatrix], devices: int) -> list[int]:
    """Choose an owner for each matrix, equally on every device.

    A device that holds a whole matrix owns it. The other matrices are assigned by cost, the most
    expensive first.
    """
    owners = [job.find_holder() for job in jobs]
    loads = [0.0] * devices
    for job, owner in zip(jobs, owners, strict=True):
        if owner is not None:
            loads[owner] += job.cost
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].cost):
        if owners[number] is None:
            job = jobs[number]
            # An owner that holds less than its share would have to receive more.
            share = job.count_elements() / devices
            holders = [rank for rank, piece in enumerate(job.pieces) if piece.size >= share]
            owner = owners[number] = min(holders, key=loads.__getitem__)
            loads[owner] += job.cost
    return [owner for owner in owners if owner is not None]
