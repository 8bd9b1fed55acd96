"""Block layouts: which blocks of queries see which blocks of keys. Data only."""

from torchweld.sparse.layout import BlockLayout

__all__ = ["BlockLayout"]
