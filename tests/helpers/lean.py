"""What a test's process leaves out, since it takes time and tests nothing.

* After each compilation Dynamo empties the processor's caches, in 50 ms, to time the new guards for
  a log, and collects garbage.
* A collection of garbage searches all modules. Most of a process's objects are theirs.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # read when Dynamo is imported

import torch

# Dynamo has the function by its name, if it has been imported, or will.
_homes: list[Any] = [torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")]  # type: ignore[attr-defined]
for _home in filter(None, _homes):
    _home.profile_guard_manager = lambda *_: 0.0

# Thresholds of the garbage collector: Python collects when 700 more objects live than before.
gc.set_threshold(50_000, 10, 10)
_MANY = 200
_modules = 0


def leave_out_modules() -> None:
    """Leave what lives out of later collections, if many modules were imported since the last."""
    global _modules
    if len(sys.modules) >= _modules + _MANY:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()
