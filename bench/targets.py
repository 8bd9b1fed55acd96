"""The aims for a GPU, computed from a run's results: met, missed or not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchweld.bench.contenders import DENSE
from torchweld.bench.runner import Result
from torchweld.registry import BACKENDS, EAGER
from torchweld.table import Table


class TimedResults:
    """The timed results of a run, by case."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._timed = [r for r in results if r.ms is not None]

    def find(
        self, op: str, shape: Sequence[int], direction: str, variant: str | None = None
    ) -> dict[str, Result]:
        """The contenders of one case in bfloat16, or of a step; `variant` is one of its words.

        An empty variant is a case without words. Of several cases it takes the one of most work.
        """
        results = [
            r
            for r in self._timed
            if (r.op, r.shape, r.direction) == (op, list(shape), direction)
            and r.dtype == ("float32" if direction == "step" else "bfloat16")
            and (variant is None or variant in r.variant.split(", "))
        ]
        most = max(results, key=lambda r: (r.flops, r.bytes), default=None)
        return {r.contender: r for r in results if most is not None and r.label == most.label}


def _find_ours(results: dict[str, Result]) -> Result | None:
    mine = [r for name, r in results.items() if name in BACKENDS]
    return min(mine, key=lambda r: r.ms or 0.0, default=None)


@dataclass(frozen=True)
class Times:
    """Milliseconds of our fastest kernel in one direction, and of the stream and the rivals.

    The backward pass takes what the whole takes beyond the forward pass.
    """

    ms: float
    limit_ms: float | None
    rivals_ms: dict[str, float]
    flops: int
    elements: int

    @classmethod
    def take(cls, full: dict[str, Result], fwd: dict[str, Result] | None) -> Times | None:
        """The times of `full`, less those of `fwd`."""
        whole = _find_ours(full)
        if whole is None or whole.ms is None:
            return None
        if fwd is None:
            rivals = {n: r.ms for n, r in full.items() if n not in BACKENDS and r.ms is not None}
            return cls(whole.ms, whole.limit_ms, rivals, whole.flops, whole.elements)
        first = fwd.get(whole.contender)
        if first is None or first.ms is None:
            return None
        limits = whole.limit_ms, first.limit_ms
        limit = None if None in limits else limits[0] - limits[1]  # type: ignore[operator]
        rivals = {
            name: r.ms - f.ms
            for name, r in full.items()
            if name not in BACKENDS and r.ms and (f := fwd.get(name)) is not None and f.ms
        }
        return cls(whole.ms - first.ms, limit, rivals, whole.flops - first.flops, whole.elements)


Figure = Callable[[TimedResults], float | None]


@dataclass(frozen=True)
class Target:
    """A kernel's aim: a figure that must reach `least`."""

    kernel: str
    aim: str
    least: float
    figure: Figure


def _find_times(
    timed_results: TimedResults, op: str, shape: Sequence[int], direction: str, variant: str | None
) -> Times | None:
    if direction != "bwd":
        return Times.take(timed_results.find(op, shape, direction, variant), None)
    fwd = timed_results.find(op, shape, "fwd", variant)
    return Times.take(timed_results.find(op, shape, "full", variant), fwd)


def _aim_at_copy(
    op: str, shape: Sequence[int], direction: str, least: float, variant: str | None = None
) -> Target:
    def figure(timed_results: TimedResults) -> float | None:
        times = _find_times(timed_results, op, shape, direction, variant)
        return None if times is None or times.limit_ms is None else times.limit_ms / times.ms

    words = f"{direction} >= {least:.0%} of a copy"
    return Target(_name_kernel(op, shape, variant), words, least, figure)


def _aim_at_rival(
    rival: str,
    op: str,
    shape: Sequence[int],
    direction: str,
    least: float,
    variant: str | None = None,
) -> Target:
    def figure(timed_results: TimedResults) -> float | None:
        times = _find_times(timed_results, op, shape, direction, variant)
        theirs = None if times is None else times.rivals_ms.get(rival)
        return None if times is None or theirs is None else theirs / times.ms

    name = "torch fused" if rival == EAGER and direction == "step" else rival
    words = f"{direction} >= {least:g}x {name}"
    return Target(_name_kernel(op, shape, variant), words, least, figure)


def _aim_at_gemm(shape: Sequence[int], most: float, variant: str) -> Target:
    """The time of a GEMM with its epilogue, as a multiple of the bare GEMM's time."""

    def figure(timed_results: TimedResults) -> float | None:
        times = _find_times(timed_results, "linear_act", shape, "fwd", variant)
        bare = None if times is None else times.rivals_ms.get("gemm")
        return None if times is None or bare is None else bare / times.ms

    words = f"fwd <= {most:g}x the bare GEMM"
    return Target(_name_kernel("linear_act", shape, variant or "erf"), words, 1 / most, figure)


def _aim_at_dense(width: int, block: int, direction: str, least: float) -> Target:
    """The rate on the computed blocks, as a part of the fastest dense attention's rate."""
    shape = 1, 16, 16384, width

    def figure(timed_results: TimedResults) -> float | None:
        times = _find_times(timed_results, _ATTENTION, shape, direction, None)
        dense = [ms for name, ms in times.rivals_ms.items() if name in DENSE] if times else []
        if times is None or not dense:
            return None
        products = {"fwd": 2, "bwd": 5}[direction]
        all_flops = 2 * products * shape[1] * shape[2] ** 2 * width
        return (times.flops / times.ms) / (all_flops / min(dense))

    words = f"{direction} >= {least:.0%} of dense SDPA's rate"
    return Target(f"{_ATTENTION} block {block}", words, least, figure)


def _name_kernel(op: str, shape: Sequence[int], variant: str | None) -> str:
    return " ".join(filter(None, [op, "x".join(map(str, shape)), variant]))


_ATTENTION = "block_sparse_attention"
_HEADS = {64: (1, 16, 16384, 64), 128: (1, 16, 16384, 128)}  # by block
_ADAM = (16, 8192, 8192), (2, 8192, 8192)  # as memory allows
_LARGE, _WIDE, _WIDEST = (32768, 4096), (16384, 8192), (4096, 65536)
_SCORES = (4, 32, 2048, 2048)
_ROTATED = (8, 32, 4096, 128)

TARGETS: tuple[Target, ...] = (
    *(
        _aim_at_copy(op, shape, direction, least)
        for op in ("layer_norm", "rms_norm")
        for shape, both in ((_LARGE, (0.9, 0.8)), (_WIDE, (0.88, 0.8)), (_WIDEST, (0.85, 0.75)))
        for direction, least in zip(("fwd", "bwd"), both, strict=True)
    ),
    *(_aim_at_rival(EAGER, op, (4096, 1024), "full", 1.0) for op in ("layer_norm", "rms_norm")),
    *(
        _aim_at_copy(op, shape, direction, least, "p 0.1")
        for op, shape in (
            ("softmax_dropout", _SCORES),
            ("bias_dropout_add", _LARGE),
            ("dropout_add_layer_norm", _LARGE),
        )
        for direction, least in (("fwd", 0.88), ("bwd", 0.8))
    ),
    _aim_at_rival(EAGER, "softmax_dropout", _SCORES, "full", 1.8, "scale 1"),
    _aim_at_rival(EAGER, "softmax_dropout", _SCORES, "full", 3.0, "mask"),
    _aim_at_rival(EAGER, "bias_dropout_add", _LARGE, "full", 2.0, "p 0.1"),
    _aim_at_rival(EAGER, "dropout_add_layer_norm", _LARGE, "full", 1.8, "p 0.1"),
    _aim_at_rival(EAGER, "linear_act", (8192, 4096), "full", 1.04, "tanh"),
    _aim_at_rival("compile", "linear_act", (8192, 4096), "full", 1.0, "tanh"),
    _aim_at_rival(EAGER, "linear_act", (8192, 1024), "full", 1.2, "tanh"),
    _aim_at_gemm((8192, 4096), 1.06, "tanh"),
    _aim_at_gemm((8192, 4096), 1.09, ""),
    *(
        _aim_at_copy("rotary_embedding", _ROTATED, direction, least, variant)
        for variant, least in (("", 0.85), ("norm_weight", 0.8))
        for direction in ("fwd", "bwd")
    ),
    *(_aim_at_rival("torch_muon", "muon", shape, "step", 1.5, "") for shape in _ADAM),
    *(
        _aim_at_dense(width, block, direction, least)
        for block, width, both in ((128, 128, (0.65, 0.5)), (64, 64, (0.45, 0.3)))
        for direction, least in zip(("fwd", "bwd"), both, strict=True)
    ),
    *(
        _aim_at_rival("flex", _ATTENTION, shape, direction, 1.15)
        for shape in _HEADS.values()
        for direction in ("fwd", "bwd")
    ),
    *(
        target
        for shape in _ADAM
        for target in (
            _aim_at_copy("adam", shape, "step", 0.9, ""),
            _aim_at_copy("adam", shape, "step", 0.8, "8-bit states"),
            _aim_at_rival(EAGER, "adam", shape, "step", 1.0, ""),
            _aim_at_rival("bitsandbytes", "adam", shape, "step", 1.5, "8-bit states"),
        )
    ),
)


def judge(results: Iterable[Result]) -> list[tuple[Target, float | None]]:
    """Every target with its figure; None if the run lacks one of its times."""
    timed_results = TimedResults(results)
    return [(target, target.figure(timed_results)) for target in TARGETS]


def show(results: Iterable[Result]) -> None:
    """Print the targets as met or missed, and which were not measured."""
    table = Table(["kernel", "target", "found", ""], numbers_from=2)
    left: dict[str, list[str]] = {}
    for target, figure in judge(results):
        if figure is None:
            left.setdefault(target.kernel, []).append(target.aim)
        else:
            met = "met" if figure >= target.least else "missed"
            table.add(target.kernel, target.aim, f"{figure:.2f}", met)
    print("targets")
    table.show()
    for kernel, aims in left.items():
        print(f"  not measured: {kernel}: {'; '.join(aims)}")
