"""Block layouts: which blocks of queries see which blocks of keys, and biases. Data only."""

from torchweld.sparse.bias import BlockBias
from torchweld.sparse.by_length import Layouts
from torchweld.sparse.layout import BlockLayout

__all__ = ["BlockBias", "BlockLayout", "Layouts"]
