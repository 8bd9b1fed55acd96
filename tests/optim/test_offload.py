"""An offloaded optimizer is bitwise equal to the optimizer itself, however gradients arrive."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

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

SETTINGS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "AdamW, masters": (optim.AdamW, torch.bfloat16, ADAMW),
    "AdamW, remainders, 8 bits": (
        optim.AdamW,
        torch.bfloat16,
        {"lr": 1e-2, "master_weights": "remainder", "state_dtype": "8bit"},
    ),
    "AdamW, stochastic": (optim.AdamW, torch.bfloat16, {"lr": 1e-2, "stochastic_rounding": True}),
    "AdamW, amsgrad, float32": (optim.AdamW, torch.float32, {"lr": 1e-2, "amsgrad": True}),
    "Lion": (optim.Lion, torch.bfloat16, {"lr": 1e-3, "master_weights": True}),
    "LAMB, 8 bits": (optim.LAMB, torch.float32, {"lr": 1e-2, "state_dtype": "8bit"}),
    "SGD, undampened first": (
        optim.SGD,
        torch.float32,
        {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5},
    ),
    "Lion, cautious": (optim.Lion, torch.float32, {"lr": 1e-3, "cautious": True}),
    "AdEMAMix, 24 bits, 8 bits": (
        optim.AdEMAMix,
        torch.bfloat16,
        {"lr": 1e-2, "master_weights": "remainder8", "state_dtype": "8bit"},
    ),
    "Adafactor": (optim.Adafactor, torch.bfloat16, {"lr": 1e-2, "master_weights": True}),
}


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


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("release", [False, True])
def test_rules_and_codecs(name: str, release: bool) -> None:
    kind, dtype, settings = SETTINGS[name]

    make = partial(kind, **settings)
    expected = train(make, dtype, steps=5, micro=2)
    found = train(offloaded(make, release_gradients=release), dtype, steps=5, micro=2)
    assert_same_run(found[:2], expected[:2])
    assert found[2] > 0


@pytest.mark.parametrize("clip", [None, 1e-2])
@pytest.mark.parametrize("release", [False, True])
def test_passes_that_nothing_announced(release: bool, clip: Any) -> None:
    """Varying numbers of backwards before a step: gradients are sent again."""

    def go(model: Any, optimizer: Any) -> None:
        for step, micro in enumerate([1, 1, 1, 3, 3, 2, 1, 1]):
            for k in range(micro):
                backward(model, 10 * step + k)
            optimizer.step()
            optimizer.zero_grad()

    make = partial(adamw, max_grad_norm=clip)
    assert_alike(make, go, release_gradients=release)


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


def test_only_ours_are_taken_over() -> None:
    """Nor an optimizer that communicates by itself."""
    theirs = torch.optim.AdamW(small_model().parameters())
    with pytest.raises(torchweld.ArgumentError, match="params_or_optimizer is a AdamW"):
        optim.Offload(theirs)
    one_bit = optim.OneBitAdam(small_model().parameters(), freeze_step=2)
    with pytest.raises(torchweld.ArgumentError, match="params_or_optimizer is a OneBitAdam"):
        optim.Offload(one_bit)


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
