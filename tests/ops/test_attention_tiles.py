"""The tiles of attention's Triton kernels: by rule, or the fastest at first use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import PLACES, running_at
from torchweld.dispatch import proof
from torchweld.functional import block_sparse_attention
from torchweld.ops.attention.block_sparse import OP
from torchweld.sparse import BlockLayout
from trying import Trials, time_by, try_on_cpu

pytestmark = pytest.mark.skipif(
    PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2])
)
BY_RULE, SMALLER, LONGER = (
    "128 x 64 by 8 warps, 3 stages",
    "64 x 64 by 4 warps, 3 stages",
    "128 x 128 by 8 warps, 2 stages",
)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trials]:
    """Triton's interpreter stands for a GPU, and is slow with the tiles by rule."""
    trials = try_on_cpu(monkeypatch, tmp_path)
    time_by(monkeypatch, trials.run_and_time)
    with running_at("interpreter", monkeypatch):
        yield trials


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels and tiles that calls run with, outside of trials."""
    from torchweld.triton_kernels import tiled
    from torchweld.triton_kernels.attention import block_sparse_attention as kernels

    ran: list[str] = []

    def run(on: torch.Tensor, launched: Any) -> None:
        options = launched.options
        sizes = [options[name] for name in ("ROWS", "COLUMNS")]
        if launched.kernel.fn.__name__ == "attention_dkv":
            sizes.reverse()
        warps, stages = options["num_warps"], options["num_stages"]
        ran.append(f"{sizes[0]} x {sizes[1]} by {warps} warps, {stages} stages")
        kernels.run(on, launched)

    monkeypatch.setattr(tiled, "run", run)
    return ran


def _inputs(dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, 1, 600, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)
    ]


LAYOUT = BlockLayout.sliding_window(600, 11, block=128)


def _attend(dtype: torch.dtype = torch.float16) -> None:
    with torch.no_grad():
        q, k, v = _inputs(dtype)
        block_sparse_attention(q, k, v, LAYOUT)


def _differentiate(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = inputs
    y = block_sparse_attention(q, k, v, LAYOUT)
    return [y, *torch.autograd.grad(y.float().square().sum(), inputs)]


def test_the_fastest_is_found_once(trials: Trials, tiles: list[str]) -> None:
    trials.ms |= {BY_RULE: 3.0, SMALLER: 1.0, LONGER: 2.0}
    inputs = _inputs()
    results = _differentiate(inputs)
    assert tiles[0] == SMALLER
    forward, *others = trials.timed
    assert forward == [BY_RULE, SMALLER, LONGER]
    assert [len(names) for names in others] == [2]  # of queries; kernels of keys have one tile
    kernels = {entry.kind["kernel"] for entry in trials.checker.entries()}
    assert kernels == {"attention of forward", "attention of queries"}

    exact = [t.detach().double().requires_grad_() for t in inputs]
    y = OP.reference(*OP.inputs(*exact, LAYOUT))[0]  # type: ignore[misc]
    for value, wanted in zip(
        results, [y, *torch.autograd.grad(y.square().sum(), exact)], strict=True
    ):
        error = (value.double() - wanted).square().mean().sqrt()
        assert error <= 2**-10 * wanted.square().mean().sqrt()

    tiles.clear()
    again = _differentiate(inputs)
    assert len(trials.timed) == 2
    assert tiles[0] == SMALLER
    assert all(map(torch.equal, results, again))


def test_a_wrong_tile_does_not_serve(
    trials: Trials, tiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes all results but its last row's."""
    from torchweld.triton_kernels.attention.block_sparse_attention import Call

    launch = Call.launch

    def launch_fewer(call: Call, kernel: Any, own: Any, tile: Any, **place: Any) -> Any:
        launched = launch(call, kernel, own, tile, **place)
        return launched._replace(grid=launched.grid - (str(tile) == SMALLER))

    monkeypatch.setattr(Call, "launch", launch_fewer)
    trials.ms[SMALLER] = 1.0
    message = f"{SMALLER} for attention of forward.* wrong result"
    with pytest.warns(RuntimeWarning, match=message):
        _attend()
    assert tiles[0] == BY_RULE


@pytest.mark.parametrize("mode", proof.MODES)
def test_only_tuning_times(
    trials: Trials, tiles: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's process takes the rule's tile, in each mode."""
    monkeypatch.setattr(proof, "mode", mode)
    monkeypatch.setattr(proof, "choose_fastest", None)
    trials.ms[SMALLER] = 1.0
    _attend()
    assert tiles[0] == BY_RULE
    assert not trials.timed


def test_calls_of_one_size_with_other_lines_are_another_class(
    trials: Trials, tiles: list[str]
) -> None:
    """With short lines the long tile is no contender, whatever served calls with long ones."""
    trials.ms[LONGER] = 1.0
    for heads, window in ((1, 11), (2, 3)):
        q = torch.randn(1, heads, 600, 16).half()
        layout = BlockLayout.sliding_window(600, window, block=128)
        block_sparse_attention(q, q, q, layout)
    assert tiles == [LONGER, BY_RULE]
    assert [LONGER in names for names in trials.timed] == [True, False]
    sizes = {entry.size for entry in trials.checker.entries()}
    assert len(sizes) == 1


def test_in_inference_mode(trials: Trials, tiles: list[str]) -> None:
    trials.ms[SMALLER] = 1.0
    with torch.inference_mode():
        _attend()
    assert tiles == [SMALLER]


def test_one_tile_is_no_question(trials: Trials) -> None:
    """float32 takes small tiles, since its products take three passes."""
    _attend(torch.float32)
    assert not trials.checker.entries()


def test_tiles_fit_blocks_and_repeat_no_rows() -> None:
    """The first of each list is the rule's; warps have 16 rows or more, but for wide numbers."""
    from torchweld.triton_kernels.attention import tiles as module

    kernels = {64: (module.FORWARD, module.QUERIES, module.BOTH)}
    kernels |= dict.fromkeys((128, 256), (*kernels[64][:2], module.KEYS, module.VALUES))
    space = itertools.product((80, 90, 100), kernels, (16, 32, 64, 128), (100, 10000))
    for generation, width, block, line in space:
        for kernel, heavy in itertools.product(kernels[width], (False, True)):
            at = (generation, kernel, width, block, line)
            rest: Any = {"wide": False, "heavy": heavy, "biased": False}
            tiles = module.tiles_of(*at, **rest)
            assert len(set(tiles)) == len(tiles)
            for tile in tiles:
                assert block % tile.own == 0
                assert tile.warps == 4 * max(tile.own // 64, 1)
            for changed in ("wide", "biased"):
                assert len(module.tiles_of(*at, **rest | {changed: True})) == 1


@pytest.mark.parametrize(
    ("capability", "kilobytes", "generation"),
    [
        *(((8, 0), 163, 80), ((8, 9), 99, 80), ((9, 0), 227, 90), ((9, 0), 99, 80)),
        *(((10, 0), 227, 100), ((10, 3), 99, 80), ((11, 0), 227, 80), ((12, 0), 99, 80)),
    ],
)
def test_tiles_are_chosen_by_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    kilobytes: int,
    generation: int,
) -> None:
    """A GPU with less than its generation's tiles take has those that fit every GPU.

    Tiles went by the capability only. No compile saw that, since a capability has one size there.
    """
    from torchweld.triton_kernels import memory
    from torchweld.triton_kernels.attention import block_sparse_attention as kernels

    properties = SimpleNamespace(shared_memory_per_block_optin=1024 * kilobytes)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    memory.find_shared_memory.cache_clear()
    assert kernels._find_generation(torch.device("cuda", 0)) == generation
    memory.find_shared_memory.cache_clear()


def test_nothing_is_chosen_before_the_engine_is_connected(
    tiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchweld.triton_kernels import tiled
    from torchweld.triton_kernels.attention import block_sparse_attention as kernels

    monkeypatch.setattr(tiled, "choose", None)
    arguments = OP.inputs(*(t.detach() for t in _inputs()), LAYOUT)  # type: ignore[misc]
    kernels.block_sparse_attention(*arguments)
    assert tiles == [BY_RULE]
