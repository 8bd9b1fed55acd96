"""Block layouts: which blocks of queries see which blocks of keys. Data only."""

from torchweld.sparse.layout import BlockLayout
from torchweld.sparse.layouts import Layouts

__all__ = ["BlockLayout", "Layouts"]
