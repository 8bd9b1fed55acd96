"""BlockBias: a learnt bias of attention's scores by the distance from query to key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from torchweld import state
from torchweld.errors import ArgumentError

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class BlockBias:
    """A table of biases, and the bucket of each distance. Make one with `relative`.

    Attributes:
        table: [heads, buckets].
        bucket_of_distance: the bucket of each distance, in the form that `relative` takes.
    """

    table: torch.Tensor
    bucket_of_distance: torch.Tensor

    @classmethod
    def relative(cls, table: torch.Tensor, bucket_of_distance: torch.Tensor) -> BlockBias:
        """A bias that depends on the head and on the distance from the query to the key.

        The table is expanded to one number per distance, never to one per pair of tokens. Its
        gradient is added up in float32, in the same order in every run.

        Args:
            table: [heads, buckets], or [1, buckets] for all heads.
            bucket_of_distance: [2 n - 1] integers: entry n - 1 + d is the bucket of the keys d
                tokens after their query. Distances beyond the ends take the end's bucket, so n need
                not exceed the distance at which buckets stop changing. The last query is aligned
                with the last key. For tokens in rows of w on a plane, [2 h - 1, 2 w - 1]: entry
                (h - 1 + y, w - 1 + x) is the bucket of the keys y rows below and x columns to the
                right.
        """
        name, places = "BlockBias", bucket_of_distance
        if table.ndim != 2 or not table.is_floating_point():
            actual = f"a {table.dtype} tensor of shape {list(table.shape)}"
            raise ArgumentError(name, "table", actual, "numbers [heads, buckets]")
        if (
            places.dtype not in _INTEGERS
            or places.ndim not in (1, 2)
            or any(n % 2 == 0 for n in places.shape)
        ):
            actual = f"a {places.dtype} tensor of shape {list(places.shape)}"
            accepted = "integers [2 n - 1] or [2 h - 1, 2 w - 1]"
            raise ArgumentError(name, "bucket_of_distance", actual, accepted)
        if table.device != places.device:
            actual, accepted = f"on {places.device}", f"the device of table, {table.device}"
            raise ArgumentError(name, "bucket_of_distance", actual, accepted)
        if not state.is_compiling() and not places.is_meta:
            low, high = (int(n) for n in places.aminmax())
            if low < 0 or high >= table.shape[1]:
                accepted = f"buckets below {table.shape[1]}, the number of buckets in table"
                raise ArgumentError(name, "bucket_of_distance", f"{low} to {high}", accepted)
        return cls(table, places)

    def with_table(self, table: torch.Tensor) -> BlockBias:
        """The same buckets with another table, which has as many buckets."""
        if table.ndim != 2 or table.shape[1] != self.table.shape[1]:
            accepted = f"[heads, {self.table.shape[1]}]"
            raise ArgumentError("BlockBias", "table", f"of shape {list(table.shape)}", accepted)
        return BlockBias(table, self.bucket_of_distance)

    def by_distance(
        self, queries: int, keys: int, first_query: int = 0, first_key: int = 0
    ) -> tuple[torch.Tensor, int]:
        """The biases of all distances, [heads, 1, distances], and the number of tokens in a row.

        Kernels read this form. `first_query` and `first_key` are the positions of the first tokens
        in a longer sequence; on a plane both must be 0.
        """
        places = self.bucket_of_distance
        row = 0 if places.ndim == 1 else (places.shape[1] + 1) // 2
        if 0 < row < keys:
            if first_query or first_key or queries > keys:
                actual = "a bias on a plane"
                accepted = "a bias on a line for parts of a sequence, or more queries than keys"
                raise ArgumentError("BlockBias", "bias", actual, accepted)
            index = self._on_plane(keys, row)
        else:
            row = max(keys, 1)
            middle = places if places.ndim == 1 else places[places.shape[0] // 2]
            ahead = keys - queries + first_query - first_key
            first = middle.shape[0] // 2 - (queries - 1) - ahead
            count = max(queries + keys - 1, 0)
            at = torch.arange(first, first + count, device=places.device)
            index = middle[at.clamp(0, middle.shape[0] - 1)]
        index = _beside(index, self.table)
        kind = torch.float64 if self.table.dtype == torch.float64 else torch.float32
        # The backward pass of an embedding adds gradients up in a fixed order.
        biases = embedding(index, self.table.to(kind).t())
        return biases.t().unsqueeze(1), row

    def _on_plane(self, keys: int, row: int) -> torch.Tensor:
        """The bucket of every difference between two tokens' places, see csrc/cpu/block_bias.h."""
        places = self.bucket_of_distance
        pitch = 2 * row - 1
        last = keys - 1 + (keys - 1) // row * (row - 1)
        difference = torch.arange(-last, last + 1, device=places.device) + (row - 1)
        down = torch.div(difference, pitch, rounding_mode="floor")
        right = difference - down * pitch
        down = (down + places.shape[0] // 2).clamp(0, places.shape[0] - 1)
        return places[down, right]


def _beside(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The table's index, as a replicated DTensor if the table is a DTensor."""
    if type(table).__name__ != "DTensor":  # importing DTensor takes half a second
        return index
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(table, DTensor)
    mesh = table.device_mesh
    for placement in table.placements:
        if not (placement.is_replicate() or placement.is_shard(0)):
            accepted = "one that is replicated or sharded by heads, Shard(0)"
            raise ArgumentError("BlockBias", "table", f"a DTensor of {placement}", accepted)
    return DTensor.from_local(index, mesh, [Replicate()] * mesh.ndim, run_check=False)
