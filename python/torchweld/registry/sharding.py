"""Which dimensions of an op's arguments may be sharded over devices, and how results follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """The first argument may be sharded in all dimensions but its last `columns`, which make a row.

    `columns` takes the forward's arguments. The other arguments follow the first one by
    broadcasting: a dimension of its full size is sharded, any other is replicated, and its gradient
    is summed over the devices. Results are sharded as the first argument.
    """

    columns: Callable[..., int]


# Elements are independent of each other.
ELEMENTS = Rows(lambda *_: 0)
# The last dimension makes a row.
ROWS = Rows(lambda *_: 1)
# Each device needs all of the first argument.
WHOLE = Rows(lambda x, *_: x.ndim)
