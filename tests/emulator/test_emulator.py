"""The emulator runs correct kernels correctly and catches planted faults."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).with_name("planted.cu")


def _build(sanitize: str = "") -> Path:
    """The planted kernels as a Python module, in a folder for each sanitizer."""
    out = ROOT / "build" / "planted" / (sanitize or "plain")
    command = [
        sys.executable,
        "csrc/build.py",
        "--planted",
        "--sanitize",
        sanitize,
        "--out",
        str(out),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out / "libtorchweld_planted.so"


@pytest.fixture(scope="module")
def planted() -> ModuleType:
    path = _build()
    spec = importlib.util.spec_from_file_location("torchweld_planted", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(comment: str) -> int:
    lines = PLANTED.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if comment in line)


def _run_sanitized(
    sanitize: str, kernel: str, size: int, *more: int
) -> subprocess.CompletedProcess[str]:
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitize]
    preload = subprocess.run(
        ["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    program = f"""
import importlib.util, numpy as np
spec = importlib.util.spec_from_file_location("torchweld_planted", {str(_build(sanitize))!r})
planted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted)
x = np.arange({size}, dtype=np.float32)
y = np.full({size}, np.nan, dtype=np.float32)
planted.{kernel}(x, y, *{more})
print("ended", y[0])
"""
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66 report_bugs=1 ignore_noninstrumented_modules=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_address_sanitizer_names_the_line() -> None:
    result = _run_sanitized("address", "one_past_the_end", 300)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
    assert f"planted.cu:{_line('an access out of bounds')}" in result.stderr
    result = _run_sanitized("address", "skip_the_last", 300)
    assert result.returncode == 0, result.stderr


def test_thread_sanitizer_names_the_line_of_a_missing_barrier() -> None:
    result = _run_sanitized("thread", "missing_barrier", 128)
    assert "data race" in result.stderr, result.stderr
    assert f"planted.cu:{_line('a missing barrier')}" in result.stderr
    assert result.returncode == 66
    result = _run_sanitized("thread", "reverse", 128)
    assert result.returncode == 0, result.stderr


def test_thread_sanitizer_sees_what_a_cluster_does_not_wait_for() -> None:
    result = _run_sanitized("thread", "missing_cluster_barrier", 64, 2)
    assert "data race" in result.stderr, result.stderr
    assert f"planted.cu:{_line('which nobody waited for')}" in result.stderr
    result = _run_sanitized("thread", "pass_on", 64, 2)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_blocks_of_a_cluster_share_memory(planted: ModuleType, blocks: int) -> None:
    x, y = np.arange(512, dtype=np.float32), np.full(512, np.nan, np.float32)
    planted.pass_on(x, y, blocks)
    expected = np.roll(x.reshape(-1, blocks, 32), 1, axis=1)
    assert np.array_equal(y, expected.ravel())


def test_a_cluster_must_meet_before_it_shares(planted: ModuleType) -> None:
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(RuntimeError, match="a block that may not have started"):
        planted.pass_on_too_early(x, y, 2)
    with pytest.raises(RuntimeError, match=r"32 of 64 threads wait.*wait_for_cluster"):
        planted.cluster_barrier_for_some(x, y, 2)
    with pytest.raises(RuntimeError, match="invalid argument"):
        planted.pass_on(np.ones(96, np.float32), y, 2)  # three blocks are no clusters of two
    planted.pass_on(x, y, 2)
    assert np.array_equal(y, x)


def test_an_unwritten_output_stays_nan(planted: ModuleType) -> None:
    x, y = np.ones(300, np.float32), np.full(300, np.nan, np.float32)
    planted.skip_the_last(x, y)
    assert list(np.flatnonzero(np.isnan(y))) == [299]


def test_shared_memory_starts_as_nan(planted: ModuleType) -> None:
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    planted.read_unwritten_shared(x, y)
    assert np.isnan(y).all()


def test_a_barrier_that_some_do_not_reach_is_an_error(planted: ModuleType) -> None:
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    for _ in range(2):  # the emulator still works after a failure
        with pytest.raises(
            RuntimeError, match=r"40 of 64 threads wait.*__syncthreads.*planted\.cu"
        ):
            planted.barrier_for_some(x, y)
    x = np.arange(128, dtype=np.float32)
    y = np.zeros(128, np.float32)
    planted.reverse(x, y)
    assert np.array_equal(y, x[::-1])


def test_the_seed_shuffles_warps(planted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = set()
    for seed in range(8):
        monkeypatch.setenv("TORCHWELD_EMULATOR_SEED", str(seed))
        y = np.zeros(256, np.float32)
        planted.order_of_warps(np.zeros(256, np.float32), y)
        assert sorted(y[:8]) == list(range(8))
        orders.add(tuple(y[:8]))
    assert len(orders) > 1


def test_a_missing_barrier_shows_in_numbers_too(planted: ModuleType) -> None:
    x, y = np.arange(128, dtype=np.float32) + 1, np.zeros(128, np.float32)
    planted.missing_barrier(np.zeros(128, np.float32), y)
    planted.missing_barrier(x, y)
    assert not np.array_equal(y, x[::-1])


def test_warp_operations(planted: ModuleType) -> None:
    generator = np.random.default_rng(0)
    n = 96
    x = generator.standard_normal(n).astype(np.float32)
    flat = np.full(8 * n, np.nan, np.float32)
    planted.warp_operations(x, flat)
    y = flat.reshape(8, n)
    lane, warp = np.arange(n) % 32, np.arange(n) // 32 * 32
    assert np.array_equal(y[0], x[warp + (lane ^ 5)])
    assert np.array_equal(y[1], x[warp + np.where(lane + 3 < 32, lane + 3, lane)])
    assert np.array_equal(y[2], x[warp + np.where(lane >= 2, lane - 2, lane)])
    assert np.array_equal(y[3], x[warp + 7])
    rows = x.reshape(3, 32)
    assert np.array_equal(y[4], np.repeat((rows > 0).sum(1), 32))
    votes = (rows > 1).any(1) + 2 * (rows > -1).all(1)
    assert np.array_equal(y[5], np.repeat(votes, 32))
    assert np.all(y[6] == (x > 0).sum() + 1000 * (x > 1).any())
    assert np.array_equal(y[7], x[warp + lane // 8 * 8 + (lane % 8 ^ 4)])


def test_copies_arrive_where_they_are_waited_for(planted: ModuleType) -> None:
    """Not before: a kernel that waits too little reads what was there."""
    x, y = np.arange(384, dtype=np.float32), np.zeros((3, 384), np.float32)
    planted.copy_behind(x, y)
    for waited, found in enumerate(y.reshape(3, 32, 12), 1):
        assert np.array_equal(found[:, : 4 * waited], x.reshape(32, 12)[:, : 4 * waited])
        assert np.isnan(found[:, 4 * waited :]).all()


def test_conversions_are_exact(planted: ModuleType) -> None:
    """Halves and bfloat16 convert exactly; floats between them round to nearest, ties to even."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)].astype(np.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(0, 65536, dtype=np.uint32) << 16) | 0x8000
    finite = halves[np.isfinite(halves)]
    half_ties = finite[:-1] + np.diff(finite) / 2
    x = np.concatenate([halves, bits.view(np.float32), ties.view(np.float32), half_ties])
    x = x[~np.isnan(x)]
    y = np.full(4 * x.size, np.nan, np.float32)
    planted.round_trip(x, y)
    bf16, fp16, half_back, bf16_back = y.reshape(4, -1)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    assert np.array_equal(fp16.astype(np.uint16), expected.view(np.uint16))
    assert np.array_equal(half_back, expected.astype(np.float32))
    raw = x.view(np.uint32).astype(np.uint64)
    rounded = ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint32)
    assert np.array_equal(bf16.astype(np.uint32), rounded)
    assert np.array_equal(bf16_back, (rounded << 16).view(np.float32))
