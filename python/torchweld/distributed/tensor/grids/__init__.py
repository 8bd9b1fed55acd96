"""Annex: tensor parallelism on grids of processes, 2D, 2.5D and 3D.

`Parallel` calls it for a `tensor` whose mode is not "1d".
"""
