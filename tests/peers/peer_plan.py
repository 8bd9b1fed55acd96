"""tp_plan, zero3 and parallelize() of transformers' models after fuse(): as in one process."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from comparing import whole_of
from processes import processes
from stack_seams import keep_model
from torchweld import numerics
from torchweld.distributed import CountCollectives, parallelize, recompute, tp_plan, zero3
from torchweld.errors import ArgumentError
from torchweld.fusion.logits import Deferred
from words import list_ops

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parents[2] / "docs" / "stack.md"
PLANS = {"tensor": False, "sequence": True}


def _wide(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}


def _build(
    whole: Any, batch: dict[str, torch.Tensor], fused: bool = True
) -> tuple[Any, Any, torch.Tensor]:
    """A model with gradients, its batch and its loss."""
    whole, given = whole.double().train(), _wide(batch)
    if fused:
        torchweld.fuse(whole)
    loss = whole(**given).loss
    assert whole(**given).loss == loss  # nothing is random
    loss.backward()
    return whole, given, loss.detach()


def _check(
    name: str, model: Any, whole: Any, given: dict[str, torch.Tensor], found: Any, loss: Any
) -> None:
    """Hold a shared model's loss, gradients and logits to the whole model's."""
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-11)
    wanted = dict(whole.named_parameters())
    largest = max(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None)
    for key, parameter in model.named_parameters():
        grad, target = parameter.grad, wanted[key].grad
        assert (grad is None) == (target is None), key
        if grad is not None:
            # Some models compute norms, angles and routers in float32.
            assert (whole_of(grad) - target).abs().max() <= 2**-21 * largest, key
            if name in COUNTED:
                torch.testing.assert_close(whole_of(grad), target, rtol=1e-10, atol=1e-12)
            elif name in STACKED | NORMED:
                torch.testing.assert_close(whole_of(grad), target)
    with torch.inference_mode():
        logits, expected = (each(**given).logits for each in (model, whole))
    torch.testing.assert_close(whole_of(logits), expected, **numerics.SUMMED_SMALL)


# A block's halves send two sums each way in the forward; a T5 decoder block's send three.
SUMS = dict.fromkeys(("T5", "T5 without gates"), 2 * 2 + 2 * 3)
# Unless the embedding's weight is the head's, the embedding sends one sum, and logits a gather.
OF_VOCABULARY = {"Llama", "Phi3", "Phi3 with fewer key heads", "StableLm"}
COUNTED = {"GPT2", "Llama", "Bert", "OPT", "T5", "Phi3", "StableLm", "T5 without gates"}
COUNTED |= {"Phi3 with fewer key heads", "ViT of ten tokens"}
# With stacked experts, which each process has a part of.
STACKED = {"Mixtral", "Qwen2Moe", "Qwen3Moe", "GraniteMoe", "Glm4Moe"}
NORMED = {"Qwen3", "Gemma3", "Cohere"}
# Models beyond the named ones, which the page does not list.
MORE: dict[str, Any] = {
    "T5 without gates": functools.partial(
        *(models.make, "T5", "ForConditionalGeneration"), dropout_rate=0.0
    ),
    "Phi3 with fewer key heads": functools.partial(models.make, "Phi3", num_key_value_heads=2),
    "ViT of ten tokens": functools.partial(
        *(models.make, "ViT", "ForImageClassification"), image_size=24, patch_size=8, num_labels=4
    ),
    "Glm4Moe": functools.partial(models.make, "Glm4Moe", first_k_dense_replace=0),
}


def _draw(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    if name not in MORE:
        return models.build(name), models.batch(name)
    model = MORE[name]()
    if name in STACKED:
        model.set_experts_implementation("eager")
    return model, models.images(24) if name.startswith("ViT") else models.tokens()


def _compare(name: str, built: tuple[Any, Any, torch.Tensor], sequence: bool) -> str:
    """Return "right", or the reason why the plan refuses the model."""
    whole, given, loss = built
    model = copy.deepcopy(whole)
    model.zero_grad()
    try:
        parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    except ArgumentError as error:
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        return f"refused: {error}"
    stacked: list[Any] = [p for p in model.parameters() if p.ndim == 3]
    assert name not in STACKED or len(stacked) == 4
    assert all(p.placements == (Shard(0),) for p in stacked if name in STACKED)
    try:
        with CountCollectives() as forward:
            found = model(**given).loss
    except ArgumentError as error:  # the number of an image's patches is known only now
        return f"refused: {error}"
    if name in COUNTED:  # and no half of a block is computed by each device
        of_vocabulary = int(not sequence and name in OF_VOCABULARY)
        sums = forward.calls["reduce-scatter" if sequence else "all-reduce"]
        assert sums == SUMS.get(name, 4) + of_vocabulary
        assert sequence or forward.calls["all-gather"] == of_vocabulary
    _check(name, model, whole, given, found, loss)
    return "right"


def _plan(rank: int, name: str, wanted: list[str], fused: bool) -> None:
    built = _build(*_draw(name), fused)
    found = {key: _compare(name, built, PLANS[key]) for key in PLANS}
    if rank == 0 and name not in MORE and fused:
        keep_model(name, found)
    assert [each.partition(":")[0] for each in found.values()] == wanted, found


def _read_page() -> dict[str, list[str]]:
    """What docs/stack.md says of each model's plans: right or refused."""
    rows = PAGE.read_text().partition("<!-- models -->")[2].partition("<!-- end -->")[0]
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows.splitlines()[3:]]
    return {
        name.strip("| "): [c.partition(":")[0].strip("| ") for c in each] for name, *each in cells
    }


PLANNED = _read_page() | {name: ["right", "right"] for name in MORE}
PLANNED["T5 without gates"] = PLANNED["T5"]


@pytest.mark.parametrize("name", [*models.NAMES, *MORE])
def test_a_plan_is_right_or_refused(name: str) -> None:
    """As the page says: two processes in float64, with and without a sharded sequence."""
    with processes(2) as two:
        two.run("cpu", _plan, name, PLANNED[name], True)


def _compare_welds(rank: int, name: str, sequence: bool) -> None:
    plain, given = models.build(name).train(), models.batch(name)
    exact, mesh = copy.deepcopy(plain).double(), init_device_mesh("cpu", (2,))
    exact(**given).loss.backward()
    found = []
    for model in (torchweld.fuse(copy.deepcopy(plain)), plain):
        parallelize_module(model, mesh, tp_plan(model, sequence))
        model(**given)
        with CountCollectives() as count:
            made = model(**given)
        made.loss.backward()
        found.append((model, made, count.calls["all-reduce"], count.calls["all-gather"]))
    (fused, made, sums, gathers), (_, usual, fewer, more) = found
    assert isinstance(made.logits, Deferred)
    assert not isinstance(usual.logits, Deferred)
    assert (sums, gathers) == (fewer + 2, more - 1)
    norms = {"layer_norm", "rms_norm", "dropout_add_layer_norm", "dropout_add_rms_norm"}
    ops = {*list_ops(fused)}
    assert "linear_cross_entropy" in ops
    assert norms & ops
    for (key, p), mine, want in zip(
        plain.named_parameters(), fused.parameters(), exact.parameters(), strict=True
    ):
        bound = numerics.Bound(want.grad, whole_of(p.grad))
        assert bound.find_fault(whole_of(mine.grad)) is None, key


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", sorted(OF_VOCABULARY & {*models.NAMES}))
def test_the_loss_and_norms_of_a_plan_are_welds(name: str, sequence: bool) -> None:
    """In float32, where logits.float() changes nothing. Counts of collectives ran outside of the
    graphs, and losses in float64, so that nothing saw that under a plan both were torch's."""
    with processes(2) as two:
        two.run("cpu", _compare_welds, name, sequence)


@pytest.mark.parametrize("name", ["Mixtral", "T5", "Phi3", "Bert"])
def test_a_plan_of_an_unfused_model(name: str) -> None:
    """What layers of an MLP do, and experts, is read from the model's own forwards.

    Before, only a fused model told it: T5's and Phi3's MLPs were whole on each device.
    """
    with processes(2) as two:
        two.run("cpu", _plan, name, PLANNED[name], False)


def _shard(rank: int, name: str) -> None:
    whole, given, loss = _build(*_draw(name))
    model: Any = zero3(copy.deepcopy(whole), init_device_mesh("cpu", (2,)))
    model.zero_grad()
    _check(name, model, whole, given, model(**given).loss, loss)


@pytest.mark.parametrize("name", ["SqueezeBert", "Funnel"])
def test_zero3_is_right(name: str) -> None:
    """The one calls `forward` of its layers, the other holds them in lists of lists."""
    with processes(2) as two:
        two.run("cpu", _shard, name)


# The modules that apply dropout to attention's weights: torch's attention draws for its own heads.
ATTENTIONS = {"GPT2Attention": "attn_dropout", "BertSelfAttention": "dropout"}


def _drops(rank: int, name: str, sequence: bool) -> None:
    whole = models.build(name, 0.3).double().train()
    for module in whole.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
        if attribute := ATTENTIONS.get(type(module).__name__):
            getattr(module, attribute).p = 0.0
    model = copy.deepcopy(whole)
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    losses = []
    for seed, each in ((2, whole), (1, whole), (1, model)):
        each.zero_grad()
        torch.manual_seed(seed)
        losses.append(each(**models.batch(name)).loss)
        losses[-1].backward()
    assert losses[0] != losses[1]
    _assert_same_gradients(whole, model, losses[1:])


def _assert_same_gradients(whole: Any, model: Any, losses: list[torch.Tensor]) -> None:
    torch.testing.assert_close(*losses)
    wanted = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(whole_of(parameter.grad), wanted[key].grad)


@pytest.mark.parametrize(
    ("name", "sequence"),
    [("GPT2", False), ("GPT2", True), ("Bert", False), ("Bert", True), ("T5", False)],
)
def test_drops_what_the_whole_drops(name: str, sequence: bool) -> None:
    """A shard's dropouts draw the whole tensor's mask."""
    with processes(2) as two:
        two.run("cpu", _drops, name, sequence)


def _compiles(rank: int, sequence: bool) -> None:
    """Each layer in one graph: gradients of one process."""
    whole = torchweld.fuse(models.build("Llama").double().train())
    model = copy.deepcopy(whole)
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    losses = [each(**models.tokens()).loss for each in (whole, model)]
    for loss in losses:
        loss.backward()
    _assert_same_gradients(whole, model, losses)


@pytest.mark.parametrize("sequence", [False, True])
def test_planned_layers_compile(sequence: bool) -> None:
    with processes(2) as two:
        two.run("cpu", _compiles, sequence)


def _undivided(rank: int) -> None:
    model = models.make("Phi3", num_key_value_heads=1)
    with pytest.raises(ArgumentError, match=r"4 heads and 1 key heads in model.layers.0.self_attn"):
        parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ArgumentError, match=r"model is a LlamaForCausalLM; .* stage\(number"):
        _start("Llama", "pp")


def test_packed_heads_and_models_that_are_not_divided() -> None:
    with processes(2) as two:
        two.run("cpu", _undivided)


# --- parallelize() --------------------------------------------------------------------------------

ROWS, MICROBATCHES, STEPS = 2, 2, 3


def _compute_loss(result: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = result.logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _start(name: str, config: Any) -> Any:
    return parallelize(
        torchweld.fuse(models.build(name).train()),
        config,
        device="cpu",
        example=(torch.zeros((ROWS, 24), dtype=torch.int64),),
        loss_fn=_compute_loss,
        microbatches=MICROBATCHES,
        max_norm=1.0,
        quiet=True,
    )


def _train(rank: int, name: str, configs: list[Any], path: str) -> None:
    """The norms of all gradients of each step, under each declaration."""
    found: list[list[float]] = []
    for config in configs:
        training = _start(name, {**config, "optimizer": {"name": "adamw", "lr": 1e-2}})
        found.append([])
        for step in range(STEPS):
            batch = []
            for number in training.own:
                generator = torch.Generator().manual_seed(10 * step + number)
                tokens = torch.randint(3, 128, (ROWS, 25), generator=generator)
                batch.append((tokens[:, :-1], tokens[:, 1:]))
            found[-1].append(training.step(batch, step)[1].item())
    if rank == 0:
        torch.save(found, path)


CONFIGS: list[dict[str, Any]] = [
    {"data": "zero1"},
    {"data": "zero3", "checkpoint": "selective"},
    {"data": "zero2", "checkpoint": "full"},
    {"tensor": 2},
    {"tensor": {"size": 2, "sequence": True}},
]


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "OPT", "Mixtral"])
def test_a_model_trains_as_in_one_process(name: str, tmp_path: Path) -> None:
    """Norms of all gradients, whose parameters come from the steps before."""
    for count, configs in ((1, [{}]), (2, CONFIGS)):
        with processes(count) as some:
            some.run(None, _train, name, configs, str(tmp_path / str(count)))
    (alone,), shared = (torch.load(tmp_path / str(count)) for count in (1, 2))
    assert alone[0] != alone[1]
    for config, found in zip(CONFIGS, shared, strict=True):
        assert found == pytest.approx(alone, rel=1e-4), config


def test_a_block_that_recomputes_takes_no_cache() -> None:
    """A cache with tokens is refused; an empty one stays empty."""
    model = models.build("Llama").train()
    layers, given = model.model.layers, {"input_ids": torch.randint(3, 128, (2, 8))}
    for at, layer in enumerate(layers):
        layers[at] = recompute(layer)
    cache = transformers.DynamicCache()
    model(**given, **{models.CACHE: cache}).logits.sum().backward()
    assert cache.get_seq_length() == 0
    filled = getattr(models.build("Llama")(**given), models.CACHE)
    with pytest.raises(ArgumentError, match="cache is one of 8 tokens; accepted: an empty one"):
        model(**given, **{models.CACHE: filled})
