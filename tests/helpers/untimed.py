"""Torch's compiler without what it does for its own statistics. Imported before torch._dynamo.

After each compilation Dynamo empties the processor's caches, in 50 ms, to time the new guards for a
log, and collects garbage.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # read when Dynamo is imported

import torch

_guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
_guards.profile_guard_manager = lambda *_: 0.0  # Dynamo imports it by this name
