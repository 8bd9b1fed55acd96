"""How plans start Triton's kernels by address: what its launcher gives to its function in C."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from torchweld.triton_kernels import launch


class CudaLauncher:
    """Stands for Triton's, with its name and attributes; `order` is what its function takes."""

    def __init__(self, order: str, started: list[Any], **attributes: Any) -> None:
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.arg_annotations, self.kernel_signature = ["annotations"], b"signature"
        self.global_scratch_size = self.profile_scratch_size = 0
        self.order, self.calls = order, 0
        self.launch = lambda *given: started.append(given)
        self.__dict__.update(attributes)

    def __call__(
        self, x: int, y: int, z: int, stream: Any, function: Any, metadata: Any, *rest: Any
    ) -> None:
        self.calls += 1
        more, enter, leave, *arguments = rest
        memory = (None, None)
        head = (x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl)
        kinds = (self.arg_annotations, self.kernel_signature)
        if self.order == "3.6":
            self.launch(*head, *memory, metadata, more, enter, leave, *arguments)
        elif self.order == "3.7":
            self.launch(*head, metadata, more, enter, leave, *memory, *kinds, tuple(arguments))
        elif self.order == "a count":
            self.launch(*head, metadata, self.calls, *kinds, tuple(arguments))
        elif self.order == "a hidden argument":
            self.launch(*head, metadata, *kinds, (*arguments, 0))
        else:
            assert self.order == "no stream"
            self.launch(*head[:3], *head[4:], metadata, *kinds, tuple(arguments))


HEAD = (5, 1, 1, "stream 2", "function", False, True)
STARTED = {
    "3.6": (*HEAD, None, None, "metadata", None, None, None, 16, 7),
    "3.7": (*HEAD, "metadata", *[None] * 5, ["annotations"], b"signature", (16, 7)),
}
UNKNOWN = {
    "scratch": ("3.7", {"global_scratch_size": 8}),
    "a sanitizer": ("3.7", {"gsan_enabled": True}),
    **{order: (order, {}) for order in ("a count", "a hidden argument", "no stream")},
}


class Compiled:
    """Stands for Triton's compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, run: Any, public: list[Any]) -> None:
        self.run, self._public = run, public

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (5, 1, 1)
        return lambda *given: self._public.append(given)


def _start(compiled: Compiled, *arguments: Any) -> bool:
    """Start it again as a plan does; whether by addresses."""
    found = launch.repeat(compiled, 5)
    if found.before is None:
        found.function(*arguments)
        return False
    given = (arguments,) if found.takes_tuple else arguments
    found.function(*found.before, "stream 2", *found.after, *given)
    return True


@pytest.mark.parametrize("version", STARTED)
def test_launchers_start_by_address(version: str) -> None:
    started: list[Any] = []
    public: list[Any] = []
    assert _start(Compiled(CudaLauncher(version, started), public), 16, 7)
    assert (started, public) == ([STARTED[version]], [])


@pytest.mark.parametrize("why", UNKNOWN)
def test_other_launchers_are_triton_s_own(why: str) -> None:
    started: list[Any] = []
    public: list[Any] = []
    order, attributes = UNKNOWN[why]
    assert not _start(Compiled(CudaLauncher(order, started, **attributes), public), 16, 7)
    assert (started, public) == ([], [(16, 7)])


def test_the_installed_triton_starts_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.8 and newer had been unknown: a list named the versions that start by address.

    The launcher's own class is called; its function in C, and the driver, need a GPU.
    """
    from triton.backends.nvidia import driver

    given: list[Any] = []
    run = object.__new__(driver.CudaLauncher)
    like = CudaLauncher("", given)
    run.__dict__.update(vars(like), gsan_enabled=False, num_ctas=1)
    for name in ("global_scratch_align", "profile_scratch_align"):
        setattr(run, name, 1)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    compiled = Compiled(run, [])
    assert _start(compiled, 16, 7)
    run(5, 1, 1, "stream 2", "function", "metadata", None, None, None, 16, 7)
    assert given[0] == given[1]
