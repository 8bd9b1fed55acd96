"""An offloaded optimizer is bitwise equal to the optimizer itself; and where its bytes are."""

from __future__ import annotations

import functools
import mmap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from offloading import (
    ADAMW,
    REPLACERS,
    UNCOUNTED,
    WRITERS,
    SimulatedTransfers,
    adamw,
    assert_alike,
    assert_same_run,
    backward,
    count_sent,
    loss_of,
    offloaded,
    run_with,
    small_model,
    take_steps,
    train,
    values,
)
from torchweld import optim
from torchweld.optim.offload._policy import MARGIN, Placement, Seen


def _muon(params: Any, **settings: Any) -> Any:
    vectors = [p for p in params if p.ndim == 1]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": vectors, "rule": "adamw"}]
    return optim.Muon(groups, **settings)


BF16, F32 = torch.bfloat16, torch.float32
# A rule, the parameters' dtype, a learning rate, and settings.
SETTINGS: list[tuple[Any, torch.dtype, float, dict[str, Any]]] = [
    (optim.AdamW, BF16, 1e-2, {"master_weights": True}),
    (optim.AdamW, BF16, 1e-2, {"master_weights": "remainder", "state_dtype": "8bit"}),
    (optim.AdamW, BF16, 1e-2, {"stochastic_rounding": True}),
    (optim.AdamW, F32, 1e-2, {"amsgrad": True}),
    (optim.Lion, BF16, 1e-3, {"master_weights": True}),
    (optim.LAMB, F32, 1e-2, {"state_dtype": "8bit"}),
    (optim.SGD, F32, 1e-1, {"momentum": 0.9, "dampening": 0.5}),  # undampened first
    (optim.Lion, F32, 1e-3, {"cautious": True}),
    (optim.AdEMAMix, BF16, 1e-2, {"master_weights": "remainder8", "state_dtype": "8bit"}),
    (_muon, F32, 0.02, {}),
    (optim.Adafactor, BF16, 1e-2, {"master_weights": True}),
]


@functools.cache
def _train_on_the_device(micro: int, clip: Any) -> Any:
    return train(partial(adamw, max_grad_norm=clip), micro=micro)


@pytest.mark.parametrize("clip", [None, 1e-2, 1e3])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize(
    ("placement", "release"), [("cpu", False), ("auto", False), ("cuda", False), ("auto", True)]
)
def test_placement_clipping_and_accumulation(
    placement: str, release: bool, micro: int, clip: Any
) -> None:
    """With "auto" the device has room for half of the states, and keeps only their gradients."""
    expected = _train_on_the_device(micro, clip)
    make = offloaded(
        adamw,
        placement=placement,
        release_gradients=release,
        clip_norm=clip,
        transfers=SimulatedTransfers(capacity=440_000 if release else 500_000),
    )
    model, optimizer, sent = train(make, micro=micro)
    assert_same_run((model, optimizer), expected[:2])
    buckets = optimizer._store.buckets
    homes = {bucket.home for bucket in buckets}
    assert homes == {"auto": {"cpu", "cuda"}, "cpu": {"cpu"}, "cuda": {"cuda"}}[placement]
    assert (sent > 0) == (placement != "cuda")
    if clip is not None:
        assert torch.equal(optimizer.grad_norm, expected[1].grad_norm)
    if release and micro == 1:  # with more passes, gradients wait for the last one
        backward(model, 9)
        for bucket in buckets:
            held = [m.param.grad is not None for m in bucket.members]
            assert held == [bucket.home == "cuda"] * len(held)


def test_a_grad_scaler_needs_all_gradients_on_the_device() -> None:
    """It would find the overflows of those that stay, and miss the others."""
    model = small_model(torch.float32)
    for placement in ("cpu", "auto"):
        optimizer = optim.Offload(
            model.parameters(), release_gradients=True, placement=placement, threads=1
        )
        before = values(model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(torchweld.ArgumentError, match="release_gradients is True with a GradS"):
            scaler.step(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
        optimizer.zero_grad()


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: f"{case[0].__name__}-{case[3]}")
@pytest.mark.parametrize("release", [False, True])
def test_rules_and_codecs(case: Any, release: bool) -> None:
    kind, dtype, lr, settings = case
    make = partial(kind, lr=lr, **settings)
    expected = train(make, dtype, steps=5, micro=2)
    found = train(offloaded(make, release_gradients=release), dtype, steps=5, micro=2)
    assert_same_run(found[:2], expected[:2])
    assert found[2] > 0


@pytest.mark.parametrize("writer", [*WRITERS, *REPLACERS])
def test_every_counted_write_is_honoured(writer: str) -> None:
    """Between backward and step, and after a step."""
    make = partial(optim.AdamW, lr=1e-2)
    write = (WRITERS | REPLACERS)[writer]
    found = run_with(write, offloaded(make))
    assert_same_run(found[:2], run_with(write, make)[:2])
    assert (found[2] > 0) == (writer != "nothing")


@pytest.mark.parametrize("writer", UNCOUNTED)
def test_uncounted_writes_need_the_switch(writer: str) -> None:
    """As the first lines of the docs say: lost by default, honoured with trust_versions=False."""
    make = partial(optim.AdamW, lr=1e-2)
    write = UNCOUNTED[writer]
    expected = run_with(write, make)
    assert_same_run(run_with(write, offloaded(make, trust_versions=False))[:2], expected[:2])
    lost = run_with(write, offloaded(make))
    pairs = zip(values(lost[0]), values(expected[0]), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("unscales", ["no", "yes", "and clips"])
def test_grad_scaler(unscales: str) -> None:
    """Overflows in some steps, and a growing scale; gradients end up unscaled."""
    grads: list[list[torch.Tensor]] = []

    def go(model: Any, optimizer: Any) -> int:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        sent = 0
        grads.append([])
        for step in range(12):
            loss = loss_of(model, step)
            scaler.scale(loss * (torch.inf if step in (4, 5, 9) else 1)).backward()
            sent += count_sent(optimizer)
            if unscales != "no":
                scaler.unscale_(optimizer)
            if unscales == "and clips":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
            grads[-1] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
        return sent

    make = partial(adamw, max_grad_norm=1e3 if unscales == "no" else None)
    sent = assert_alike(make, go, lambda: small_model(torch.float32))
    assert len(grads[0]) == 12 * 8
    pairs = zip(*grads, strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    # What is often written is sent in step() only.
    assert (sent > 40) == (unscales == "no")


def test_groups_schedulers_and_closures() -> None:
    """A tensor as learning rate, a group added later, the norm of all gradients."""
    runs = []
    for is_offloaded in (False, True):
        model = small_model()
        first, second = list(model[0].parameters()), list(model[2].parameters())

        def make(params: Any) -> Any:
            groups = [{"params": params[0]}, {"params": params[1], "lr": torch.tensor(1e-3)}]
            return optim.AdamW(groups, **ADAMW, max_grad_norm=0.1)

        optimizer = (offloaded(make) if is_offloaded else make)([first, second])  # type: ignore[list-item]
        later = {"params": model[4].parameters(), "weight_decay": 0.5, "state_dtype": "8bit"}
        optimizer.add_param_group(later)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):

            def closure(step: int = step, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
            scheduler.step()
        runs.append((model, optimizer))
    assert_same_run(runs[1], runs[0])


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_checkpoints_go_both_ways(state_dtype: Any, tmp_path: Path) -> None:
    make = partial(adamw, state_dtype=state_dtype, min_quantized_size=0)
    makers: dict[str, Any] = {
        "ours": offloaded(make),
        "given": make,
        "auto": offloaded(make, placement="auto"),
    }
    for saver in makers:
        model, optimizer, _ = train(makers[saver])
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
        for loader in makers:
            runs = []
            for goes_on in (saver, loader):
                other = small_model()
                weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
                one = makers[goes_on](list(other.parameters()))
                one.load_state_dict(state)
                other.load_state_dict(weights)
                take_steps(other, one, 7, 8)
                runs.append((other, one))
            assert_same_run(runs[1], runs[0])


def _with_hooks(optimizer: Any, seen: list[tuple[str, Any]], prefix: str) -> Any:
    """Register all hooks on states that torch has; two of them replace what they are given."""

    def before_saving(of: Any) -> None:
        seen.append((prefix + "before saving", of))

    def after_saving(of: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((prefix + "after saving", of))
        return state_dict | {prefix + "note": len(state_dict["state"])}

    def before_loading(of: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((prefix + "before loading", of))
        groups = [group | {"lr": group["lr"] / 2} for group in state_dict["param_groups"]]
        return state_dict | {"param_groups": groups}

    def after_loading(of: Any) -> None:
        seen.append((prefix + "after loading", of))
        of.param_groups[0]["weight_decay"] = 0.25

    optimizer.register_state_dict_pre_hook(before_saving)
    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(after_loading)
    return optimizer


def test_hooks_on_states_run_as_on_torch_optimizers() -> None:
    """Also the original optimizer's hooks, inside Offload's."""
    runs: list[list[str]] = []
    for maker in (torch.optim.AdamW, adamw, offloaded(adamw)):
        model, optimizer, _ = train(maker)
        seen: list[tuple[str, Any]] = []
        _with_hooks(optimizer, seen, "")
        saved = optimizer.state_dict()
        assert saved["note"] == len(saved["state"]) == len(list(model.parameters()))
        lr = saved["param_groups"][0]["lr"]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == lr / 2
        assert optimizer.param_groups[0]["weight_decay"] == 0.25
        assert saved["param_groups"][0]["lr"] == lr
        assert all(of is optimizer for _, of in seen)
        runs.append([name for name, _ in seen])
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] == ["before saving", "after saving", "before loading", "after loading"]
    # Both optimizers' hooks, around one state.
    seen = []
    given = _with_hooks(adamw(list(small_model().parameters())), seen, "given, ")
    both = _with_hooks(offloaded(lambda _: given)([]), seen, "")
    both.load_state_dict(saved := both.state_dict())
    assert {"note", "given, note"} <= saved.keys()
    assert [name for name, _ in seen] == [
        *("before saving", "given, before saving", "given, after saving", "after saving"),
        *("before loading", "given, before loading", "given, after loading", "after loading"),
    ]


def test_states_on_the_given_optimizer_come_along_and_go_back() -> None:
    expected = train(adamw, steps=6)
    model, given, _ = train(adamw, steps=2)
    offload = offloaded(lambda _: given)([])
    take_steps(model, offload, 2, 3)
    assert all(offload.state[p] is given.state[p] for p in model.parameters())
    offload.close()
    take_steps(model, given, 4, 5)
    assert_same_run((model, given), expected[:2])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"placement": "gpu"}, "placement"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"threads": 0}, "threads"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"placement": "cuda", "release_gradients": True}, "release_gradients"),
        ({"trust_versions": False, "release_gradients": True}, "trust_versions"),
        ({"lr": 1.0}, "params_or_optimizer"),
    ],
)
def test_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    given = optim.AdamW(small_model().parameters())
    with pytest.raises(torchweld.ArgumentError) as raised:
        optim.Offload(given, **arguments)
    assert raised.value.argument == named
    # Only ours are taken over, and none that communicates by itself.
    params = [*small_model().parameters()]
    for other in (torch.optim.AdamW(params), optim.OneBitAdam(params, freeze_step=2)):
        with pytest.raises(torchweld.ArgumentError, match=f"is a {type(other).__name__}"):
            optim.Offload(other)


class _Odd(torch.nn.Module):
    """Sparse gradients, complex numbers, channels-last, no elements, a shared matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(30, 12, sparse=True)
        conv: Any = torch.nn.Conv2d(3, 8, 3)  # torch annotates no `to` with a memory format only
        self.conv = conv.to(memory_format=torch.channels_last)
        self.waves = torch.nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.shared = torch.nn.Parameter(torch.randn(12, 12))
        self.unused = torch.nn.Parameter(torch.randn(3))
        self.columns = torch.nn.Parameter(torch.randn(9, 6).t())

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(30, (6,), generator=generator)
        x = self.words(ids) @ self.shared @ self.shared.t()
        image = self.conv(torch.randn(2, 3, 6, 6, generator=generator))
        others = self.waves.abs().sum() + self.empty.sum() + self.columns.square().sum()
        return x.square().mean() + image.square().mean() + others


@pytest.mark.parametrize("release", [False, True])
def test_odd_parameters(release: bool) -> None:
    strides = []

    def go(model: Any, optimizer: Any) -> None:
        for step in range(5):
            for micro in range(2):
                model(10 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()["state"].values()
        strides.append([[v.stride() for v in state.values()] for state in states])

    make = partial(optim.SGD, lr=1e-2, momentum=0.9)
    assert_alike(make, go, _Odd, release_gradients=release, bucket_bytes=500)
    assert strides[0] == strides[1]


# --- Where bytes are ------------------------------------------------------------------------------


COUNT = 256 * 1024  # parameters of one large matrix
# Bytes of AdamW's states per parameter (docs/optimizers.md), by dtype and codec.
STATES: list[tuple[torch.dtype, dict[str, Any], float]] = [
    (F32, {}, 8),
    (BF16, {"master_weights": True}, 12),
    (BF16, {"master_weights": "remainder"}, 10),
    (BF16, {"master_weights": True, "state_dtype": BF16}, 8),
    (BF16, {"master_weights": True, "state_dtype": "8bit"}, 6 + 1 / 32),
    (BF16, {"master_weights": "remainder", "state_dtype": "8bit"}, 4 + 1 / 32),
]
STEP = 4  # bytes of the count of a tensor's steps


def matrix(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1024, 256, bias=False).to(dtype)


def after_a_backward(dtype: torch.dtype, codec: Any, **arguments: Any) -> Any:
    """After two steps, with the third one's gradients on the host."""
    model = matrix(dtype)
    optimizer = offloaded(partial(optim.AdamW, **codec), **arguments)(list(model.parameters()))
    for step in range(3):
        model(torch.ones(2, 1024, dtype=dtype)).float().square().mean().backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(("dtype", "codec", "states"), STATES)
@pytest.mark.parametrize("release", [False, True])
def test_bytes_for_a_parameter(
    dtype: torch.dtype, codec: Any, states: float, release: bool
) -> None:
    """The device: the parameter, and its gradient until it has left. The host: both, and states."""
    optimizer = after_a_backward(dtype, codec, release_gradients=release)
    size = dtype.itemsize
    memory = optimizer.memory()
    assert memory["device"] == {
        "parameters": size * COUNT,
        "gradients": 0 if release else size * COUNT,
        "states": 0,
        "activations": 0,
    }
    assert memory["host"] == {
        "parameters and gradients": 2 * size * COUNT,
        "states": states * COUNT + STEP,
        "activations": 0,
    }
    # As measured: the storages of these tensors.
    held = [bucket.buffers for bucket in optimizer._store.buckets]
    stored = [b.untyped_storage().nbytes() - b.nbytes for some in held for b in some]
    assert sum(b.nbytes for some in held for b in some) == 2 * size * COUNT
    assert max(stored) < mmap.PAGESIZE  # each buffer begins on a page
    assert sum(optimizer._transfers.pinned.values()) == 2 * size * COUNT


def test_bytes_on_the_device() -> None:
    for placement in ("cuda", "auto"):
        optimizer = after_a_backward(torch.bfloat16, {"master_weights": True}, placement=placement)
        memory = optimizer.memory()
        assert memory["device"]["states"] == 12 * COUNT + STEP
        assert not any(memory["host"].values())
        assert not optimizer._transfers.pinned


def test_traffic() -> None:
    """A gradient leaves once, and a parameter returns once: four bytes for each in bfloat16."""
    transfers = SimulatedTransfers()
    optimizer = after_a_backward(torch.bfloat16, {"master_weights": True}, transfers=transfers)
    optimizer.step()
    made = 1  # the parameter's copy when the optimizer is made
    assert (transfers.fetched_bytes, transfers.given_bytes) == (
        2 * COUNT * (3 + made),
        2 * COUNT * 3,
    )


def test_auto_follows_the_pressure() -> None:
    """Others use more of the device, then less: states leave and return, and bits are equal.

    The device raises an error on a lack of memory. The others' use grows by less than the margin
    per step, except where everything leaves.
    """
    capacity = 800_000
    pressure = [0, 0, 0, 60_000, 120_000, 180_000, 240_000, 300_000, 400_000, 480_000]
    pressure += [480_000, 100_000, 0, 0, 0, 0]
    others = [0]
    transfers = SimulatedTransfers(capacity, lambda: others[0])
    model = small_model()
    optimizer = offloaded(adamw, placement="auto", transfers=transfers)(list(model.parameters()))
    on_device = []
    for step, others[0] in enumerate(pressure):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        on_device.append(optimizer.memory()["device"]["states"])
        # The gradients and the others' memory are counted at their peak.
        seen = max(pressure[max(0, step - 2) : step + 1])
        params = sum(p.nbytes for p in model.parameters())
        assert on_device[-1] + 2 * params + seen <= max(MARGIN * capacity, 2 * params + seen)
    assert on_device[0] > on_device[7] > on_device[10] == 0
    assert on_device[-1] == on_device[0]
    expected = train(adamw, steps=len(pressure))
    assert_same_run((model, optimizer), expected[:2])


@pytest.mark.parametrize("release", [False, True])
def test_auto_charges_what_a_phase_uses(release: bool) -> None:
    """Four buckets, and room for three: activations and gradients are not there at once."""
    size, layers = 64 * 64, 4
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))).bfloat16()
    params, states = 2 * size * layers, 12 * size + STEP
    others = [0]
    forward, backward_peak = 3 * params, params  # others' bytes
    first_gradient = 2 * size  # it ends the forward
    needed = params + max(forward + first_gradient, backward_peak + params) + 3 * states
    if release:
        needed += 3 * 2 * size
    transfers = SimulatedTransfers(int(needed / MARGIN) + 8, lambda: others[0])
    optimizer = offloaded(
        partial(optim.AdamW, master_weights=True),
        placement="auto",
        release_gradients=release,
        transfers=transfers,
        bucket_bytes=2 * size,
    )(list(model.parameters()))
    on_device = []
    for _ in range(6):
        others[0] = forward
        loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean()
        last: Any = model[-1]
        hook = last.weight.register_post_accumulate_grad_hook(
            lambda _: others.__setitem__(0, backward_peak)
        )
        loss.backward()
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        on_device.append(sum(bucket.home == "cuda" for bucket in optimizer._store.buckets))
    # The first step does not show whether gradients outlive it, and is remembered for three.
    assert on_device[-1] == 3
    assert on_device[0] < 3 or release


def test_relieve_takes_all_to_the_host() -> None:
    model, optimizer, _ = train(offloaded(adamw, placement="auto"))
    assert optimizer.memory()["device"]["states"] > 0
    backward(model, 4)
    optimizer.relieve()
    assert optimizer.memory()["device"]["states"] == 0
    optimizer.step()
    expected = train(adamw, steps=5)
    assert_same_run((model, optimizer), expected[:2])


def test_gradients_may_outlive_the_first_step() -> None:
    """One step shows nothing of it, and a later one does."""
    placement = Placement()
    first = {"forward": Seen(50, 0, may_come=30), "backward": Seen(60, 0)}
    assert sum(placement.decide(first, [10] * 9, 100)) == 1  # 90 - 80
    for _ in range(2):
        assert sum(placement.decide(first, [10] * 9, 100)) == 1  # three steps are remembered
    assert sum(placement.decide(first, [10] * 9, 100)) == 3  # 90 - 60
    grown = first | {"forward": Seen(50 + 30 + 30, 30)}
    assert sum(placement.decide(grown, [10] * 9, 100)) == 1
    placement.forget()
    assert sum(placement.decide(first, [10] * 9, 100, keep=lambda room: room)) == 0
