"""Tensor parallelism: styles, and the plans that choose them; grids are an annex."""
