"""Names of layers for `kernels`: of classes that have none, if they compute what a name says."""

from __future__ import annotations
