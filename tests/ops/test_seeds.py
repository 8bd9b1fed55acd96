"""Seeds that a GPU's calls draw on the host: their numbers, and kernels that take them by value."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fresh
from conftest import PLACES, running_at
from oracle import Results, run
from torchweld.bench.cases import CASES
from torchweld.dispatch import seeds
from torchweld.dispatch.warm import plans
from torchweld.registry import OPS, TensorSpec, materialize

HELPERS = Path(__file__).parents[1] / "helpers"
MISSING = PLACES["interpreter"][2]
interpreted = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
DROPPING = [name for name, op in OPS.items() if op.seed_at is not None and "triton" in op.sources]


class Generator:
    """A GPU's generator as far as a draw sees it."""

    def __init__(self, seed: int = 0) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        self._seed, self._offset = seed, 0

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0, "torch refuses others"
        self._offset = offset


def _draw(generator: Any, count: int) -> list[int]:
    return [seeds.draw_number(generator) for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 7, 2**64 - 1])
def test_manual_seed_governs_and_the_generator_advances(seed: int) -> None:
    generator = Generator(seed)
    first = _draw(generator, 3)
    assert generator.get_offset() == 12
    second = _draw(generator, 3)
    generator.set_offset(12)  # as a checkpoint restores it
    assert _draw(generator, 3) == second
    generator.manual_seed(seed)
    assert _draw(generator, 3) == first
    assert not {*first} & {*second}
    assert not {*first, *second} & {*_draw(Generator(seed ^ 1), 6)}


def test_numbers_are_of_one_kind_and_their_bits_independent() -> None:
    """Triton has one kernel for odd numbers of 63 bits. Others of their bits: five sigma."""
    drawn = _draw(Generator(3), 4096) + _draw(Generator(4), 4096)
    assert len({*drawn}) == len(drawn)
    assert all(number >> 62 == 1 and number & 1 for number in drawn)
    bits = torch.tensor([[n >> at & 1 for at in range(1, 62)] for n in drawn]).double() * 2 - 1
    limit = 5 * len(drawn) ** 0.5
    assert (bits.sum(0).abs() < limit).all()
    pairs = bits.T @ bits
    assert (pairs[~torch.eye(61, dtype=torch.bool)].abs() < limit).all()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for a tensor on a GPU, with a generator."""
    generator = Generator(11)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cpu")  # where a seed in the GPU's memory is drawn here
    return SimpleNamespace(is_cuda=True, get_device=lambda: 0, device=device, generator=generator)


def test_a_call_draws_on_the_host(on_gpu: Any) -> None:
    state = torch.get_rng_state()
    with FlopCounterMode(display=False):  # a mode that records no graph changes nothing
        drawn = seeds.draw(on_gpu)
    assert drawn.tolist() == _draw(Generator(11), 1)
    assert (drawn.shape, drawn.dtype, drawn.is_cpu) == ((1,), torch.int64, True)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_later_call_draws_as_the_first(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it once found, a call may be captured."""
    drawn = [seeds.draw(on_gpu), seeds.draw_again(on_gpu), seeds.draw_again(on_gpu)]
    assert [x.tolist() for x in drawn] == [[number] for number in _draw(Generator(11), 3)]
    assert {(x.shape, x.dtype, x.is_cpu) for x in drawn} == {((1,), torch.int64, True)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = on_gpu.generator.get_offset()
    assert seeds.draw_again(on_gpu).dtype is torch.int64
    assert on_gpu.generator.get_offset() == before


@pytest.mark.parametrize("how", ["capture", "make_fx", "fake", "vmap", "old torch"])
def test_graphs_draw_in_memory(how: str, on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would repeat a number of the host at each replay."""
    if how == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if how == "old torch":
        monkeypatch.setattr(seeds, "_HAS_OFFSETS", False)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + seeds.draw(on_gpu)

    x = torch.zeros(2, dtype=torch.int64)
    if how == "make_fx":
        graph = make_fx(function)(x)
        assert len({int(graph(x)[0]) for _ in range(3)}) == 3
    elif how == "vmap":
        torch.func.vmap(function, randomness="same")(x[:, None])
    elif how == "fake":
        with FakeTensorMode():
            function(torch.zeros(2, dtype=torch.int64))
    else:
        function(x)
    assert on_gpu.generator.get_offset() == 0


def _differentiate(name: str, inputs: list[Any]) -> Results:
    return run(OPS[name], inputs, OPS[name].kernels["triton"])


@interpreted
@pytest.mark.parametrize("name", DROPPING)
def test_a_seed_by_value_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients; plans of launches take the number of each call."""
    from torchweld.triton_kernels import dropout

    op, taken = OPS[name], []
    steps = op.kernels["triton"].steps
    at, drawn = op.seed_at, _draw(Generator(7), 3)
    for step in (steps.forward, steps.backward):
        monkeypatch.setattr(step, "_plans", {})
    sample = next(
        s for s in CASES[op.name].samples if isinstance(s[at], TensorSpec) and len(s[0].shape) > 1
    )
    with running_at("interpreter", monkeypatch):
        inputs = [materialize(sample, torch.float32, requires_grad=True) for _ in drawn]
        for each, number in zip(inputs, drawn, strict=True):
            each[at] = torch.tensor([number])
        expected = [_differentiate(name, each) for each in inputs]
        numbers = [steps.forward(*each) for each in inputs]
        monkeypatch.setattr(dropout, "is_in_memory", lambda *_: False)
        run_plan = plans.Plan.run
        monkeypatch.setattr(
            plans.Plan,
            "run",
            lambda plan, given: (taken.append(plan.seed), run_plan(plan, given))[1],
        )
        for step in (steps.forward, steps.backward):
            monkeypatch.setattr(step, "_plans", {})
        found = [_differentiate(name, each) for each in inputs]
        planned = [steps.forward(*each) for each in inputs]
    for results, wanted in zip(found, expected, strict=True):
        assert results.keys() == wanted.keys()
        assert all(torch.equal(results[key], wanted[key]) for key in wanted)
    for got, wanted in zip(planned, numbers, strict=True):
        pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
        assert all(map(torch.equal, *zip(*pairs, strict=True)))
    assert not torch.equal(numbers[0][0], numbers[1][0])
    assert {*taken} <= {at}
    # Plans of attention wait for the choice of a tile, which the interpreter does not make.
    is_recorded = hasattr(steps.forward._find(), "launching") and name != "block_sparse_attention"
    assert bool(taken) == is_recorded


COMPILE = """
import json, sys

sys.path.insert(0, sys.argv[2])
import resources

found, seen, seed = [], set(), int(sys.argv[1])
for case, launch in resources.launches(90):
    names = launch.kernel.arg_names
    at = names.index("seed_ptr") if "seed_ptr" in names else None
    if at is None or launch.args[at] is None or launch.kernel in seen:
        continue
    seen.add(launch.kernel)
    by_value = launch._replace(args=(*launch.args[:at], seed, *launch.args[at + 1 :]))
    each = resources.Compile(case, by_value, True)
    taken = resources._of_machine_code(each.compile(90).asm["cubin"])
    found.append([each.kernel, each.signature[0]["seed_ptr"], taken["spilled"]])
print(json.dumps(found))
"""


def test_kernels_compile_with_a_seed_by_value() -> None:
    """Each kernel that drops, for an H100: the seed is a number of 64 bits, and nothing spills."""
    pytest.importorskip("triton", reason="Triton is not installed")
    number = str(_draw(Generator(3), 1)[0])
    ran = fresh.run(COMPILE, number, str(HELPERS), TRITON_INTERPRET="0")
    found = json.loads(ran.stdout)
    files = {kernel.rpartition(".")[0] for kernel, *_ in found}
    assert files >= {"attention.forward", "bias_dropout_add", "dropout_add_norm", "softmax"}
    assert all(kind == "i64" and spilled == 0 for _, kind, spilled in found), found
