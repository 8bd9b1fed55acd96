"""kernels' mapping with our layers, on models of transformers: eager, compiled, saved, explained.

The release of transformers that `make test-peers` installs takes a newer `kernels` than the
package index has, and names no layer. The same target runs this file with an older release, which
does.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peer_fuse
import pytest
import torch
import transformers
from kernels import Mode, kernelize, register_kernel_mapping
from kernels.layer import globals as switches
from kernels.layer import layer as kernels_layer
from kernels.layer import repos as kernels_repos
from models import IS_TESTED_RELEASE, MODELS, batch, build, list_welds, make_kind, tokens
from transformers import AutoModelForCausalLM, activations
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.utils import import_utils

import torchweld
from conftest import running_at
from selection import TRITON, TRITON_DEVICE
from torchweld import huggingface, numerics
from torchweld.errors import ArgumentError
from torchweld.huggingface import _kernel_layers as layers
from torchweld.huggingface._kernel_mapping import LAYERS, Repository

NAMED = import_utils.is_kernels_available()  # whether transformers names its layers
of_transformers = pytest.mark.skipif(not NAMED, reason="transformers takes another kernels")
pytestmark = pytest.mark.filterwarnings("ignore:transformers .* takes kernels:UserWarning")
ROTATION = kernels_layer._create_func_module(
    getattr(modeling_llama.apply_rotary_pos_emb, "kernel_function", None)
    or (lambda q, k, cos, sin, unsqueeze_dim=1: None)
)
LOSS = kernels_layer._create_func_module(ForCausalLMLoss)
TRAINING, COMPILED = Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE
# The classes that have these names, or would have.
REPLACED: dict[str, type[torch.nn.Module]] = {
    **{"RMSNorm": LlamaRMSNorm, "RMSNormZeroCentered": LlamaRMSNorm},
    **{"RMSNormGated": Qwen3NextRMSNormGated, "LayerNorm": torch.nn.LayerNorm},
    **{"rotary_pos_emb": ROTATION, "SwiGLUMLP": LlamaMLP, "GeGLUMLP": GemmaMLP},
    **{"SiLU": activations.SiLUActivation, "GeLU": activations.GELUActivation},
    **{"GeluTanh": activations.GELUTanh, "NewGELU": activations.NewGELUActivation},
    **{"FastGELU": activations.FastGELUActivation, "QuickGELU": activations.QuickGELUActivation},
    **{"LinearAct": BertIntermediate, "ForCausalLMLoss": LOSS},
}


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let our kernels serve small inputs too, and leave no mapping and no function behind."""
    token = switches._KERNEL_MAPPING.set({})
    functions = (modeling_llama, modeling_gpt_oss, modeling_openai_privacy_filter)
    with torchweld.use_backend("cpu", "eager"):
        yield
    switches._KERNEL_MAPPING.reset(token)
    for file in functions:
        vars(file.apply_rotary_pos_emb).pop("forward", None)


def _take(model: Any, mode: Mode = COMPILED) -> Any:
    """Kernelize a model by our mapping."""
    with huggingface.kernel_mapping():
        return kernelize(model, mode=mode, device="cpu")


def _becomes(model: Any) -> Counter[str]:
    rows = torchweld.explain_fusion(model)
    return Counter(row.becomes for row in rows if row.becomes.endswith("by kernelize"))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_kernels_accepts(name: str) -> None:
    layer: Any = LAYERS[name]
    assert layer.can_torch_compile
    assert layer.has_backward
    repo = Repository(layer)
    assert repo.load() is layer
    assert copy.deepcopy(repo) == repo
    kernels_layer._validate_layer(check_cls=REPLACED[name], cls=layer, repo=repo)


# --- Models ---------------------------------------------------------------------------------------

FAMILIES = {
    "Llama": {"rms_norm": 5, "gated_act (silu)": 2},
    "Qwen3": {"rms_norm": 9, "gated_act (silu)": 2},
    "Gemma3": {"rms_norm, weight + 1": 13, "gated_act (gelu)": 2},
    "Olmo2": {"rms_norm": 9, "gated_act (silu)": 2},
    "GptOss": {"rms_norm": 5},
    "GPT2": {"layer_norm": 5, "linear_act": 2},
    "Qwen3Next": {"rms_norm, gated_act": 1, "rms_norm, weight + 1": 7, "gated_act (silu)": 2},
}
# None of these has a rotation that transformers names, of all its columns.
NO_ROTATION = ("Gemma3", "GPT2", "Qwen3Next")


def _make(name: str) -> Any:
    """A family's small model, in training."""
    if name != "Qwen3Next":
        return build(name).train()
    torch.manual_seed(0)
    sizes = {f"linear_{of}": n for n, of in ((2, "num_key_heads"), (4, "num_value_heads"))}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = ["linear_attention", "full_attention"]
    model: Any = make_kind("qwen3_next", layer_types=kinds, **sizes).train()
    model.set_experts_implementation("eager")
    return model


def _check_layers(name: str, model: Any) -> None:
    """explain_fusion has our layers, as many as the family has."""
    expected = FAMILIES[name] | {"cross_entropy": 1}
    expected |= {"rotary_embedding_qk": 2} if NAMED and name not in NO_ROTATION else {}
    found = _becomes(model)
    for what, count in expected.items():
        assert found[f"{what}, by kernelize"] == count, (what, found)


# The backward pass of a compiled Qwen3-Next fails in torch, without us too.
RUNS = [(name, compiled) for name in FAMILIES for compiled in (False, name != "Qwen3Next")]


@pytest.mark.parametrize(("name", "compiled"), dict.fromkeys(RUNS))
def test_losses_and_gradients(name: str, compiled: bool) -> None:
    """Against the unchanged model in float64, in training; explain_fusion names each layer."""
    model, given = _make(name), tokens()
    if compiled and name == "GptOss":  # eager experts have a loop that no graph takes
        model.set_experts_implementation("batched_mm")
    plain = peer_fuse._results(model, given)
    truth = peer_fuse._results(copy.deepcopy(model).double(), given)
    huggingface.name_layers(model)
    _take(model)
    _check_layers(name, model)
    ran: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    peer_fuse._agree(peer_fuse._results(ran, given), plain, truth)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_entries_of_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward by the kernels of Triton: on a GPU, or in the interpreter.

    The backend is selected by name, so that a layer that it cannot serve raises an error. No test
    ran a layer that `kernelize` took for CUDA.
    """
    monkeypatch.setattr(kernels_repos, "_find_capability", lambda: 90)
    model, given = _make(name), tokens(1)
    plain = peer_fuse._results(model, given)
    truth = peer_fuse._results(copy.deepcopy(model).double(), given)
    huggingface.name_layers(model)
    with huggingface.kernel_mapping():
        kernelize(model, mode=TRAINING, device="cuda")
    _check_layers(name, model)
    with running_at(TRITON, monkeypatch):
        moved = {key: value.to(TRITON_DEVICE) for key, value in given.items()}
        found = peer_fuse._results(model.to(TRITON_DEVICE), moved)
    peer_fuse._agree([each.to("cpu") for each in found], plain, truth)


def test_inductor_compiles_a_kernelized_model() -> None:
    model, given = build("Llama").train(), tokens()
    plain = peer_fuse._results(model, given)
    truth = peer_fuse._results(copy.deepcopy(model).double(), given)
    huggingface.name_layers(model)
    compiled: Any = torch.compile(_take(model), fullgraph=True)
    peer_fuse._agree(peer_fuse._results(compiled, given), plain, truth)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_course_of_training(name: str) -> None:
    plain, taken, given = _make(name), _make(name), tokens()
    huggingface.name_layers(taken)
    expected = peer_fuse._losses(plain, given)
    assert peer_fuse._losses(_take(taken, TRAINING), given) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_without_us_then_fused(name: str, tmp_path: Path) -> None:
    """Files of a kernelized model are the model's; fuse welds what kernelize did not take."""
    torch.compiler.reset()
    model, given = _make(name).eval(), tokens()
    expected = model(**given).logits
    huggingface.name_layers(model)
    _take(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == _make(name).state_dict().keys()
    for each in (loaded, torchweld.fuse(loaded), torchweld.fuse(model)):
        torch.testing.assert_close(each(**given).logits, expected, **numerics.CHAINED_SMALL)
    if name in MODELS:
        # kernelize replaced the rotation of the file, which all models share.
        rows = list_welds(loaded).elements()
        assert Counter(row.removesuffix(", by kernelize") for row in rows) == MODELS[name]


@of_transformers
@pytest.mark.parametrize("name", MODELS)
def test_fuse_welds_the_same_where_functions_are_modules(name: str) -> None:
    """With `kernels` installed apply_rotary_pos_emb is a module, which each attention refers to.

    fuse could not copy such an attention and welded no rotation in any model: no test ran with
    `kernels` installed.
    """
    model = torchweld.fuse(build(name).train())
    model(**batch(name))
    # In 5.21 OPT's loop over its layers asks a random number, so that each is captured by itself.
    is_split = name == "OPT" and not IS_TESTED_RELEASE
    assert list_welds(model) == MODELS[name] or is_split


@of_transformers
def test_use_kernels_keeps_a_registered_mapping(tmp_path: Path) -> None:
    """Also over train() and eval(), which kernelize again; a context's layers are lost by then."""
    build("Llama").save_pretrained(tmp_path)
    with huggingface.kernel_mapping():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True)
    assert _becomes(model)["rms_norm, by kernelize"] == 5
    model.train()
    reasons = [row.reason for row in torchweld.explain_fusion(model)]
    assert any("kept its own forward: the mapping" in reason for reason in reasons)
    register_kernel_mapping(huggingface.kernel_mapping())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True)
    for each in (model, model.train(), model.eval()):
        assert _becomes(each)["rms_norm, by kernelize"] == 5


@pytest.mark.parametrize("spoilt", [None, "hook", "layer", "activation", "adapter"])
def test_a_linear_layer_with_its_activation_as_it_was_named(
    spoilt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One op computes both, unless one of them has a hook or is another one since."""
    model: Any = torch.nn.Module()
    model.block = BertIntermediate(build("Bert").config)
    x, block, calls = torch.randn(4, 64), model.block, []
    assert huggingface.name_layers(model) == ["block"]
    _take(model)
    if spoilt == "hook":
        block.dense.register_forward_hook(lambda module, args, y: 2 * y)
    elif spoilt == "layer":
        block.dense = torch.nn.Sequential(block.dense, torch.nn.Linear(128, 128))
    elif spoilt == "activation":
        block.intermediate_act_fn = torch.nn.ReLU()
    elif spoilt == "adapter":
        torch.nn.utils.parametrizations.weight_norm(block.dense)
    own = layers.functional.linear_act
    monkeypatch.setattr(
        layers.functional, "linear_act", lambda *a, **how: calls.append(1) or own(*a, **how)
    )
    torch.testing.assert_close(block(x), block.intermediate_act_fn(block.dense(x)))
    assert len(calls) == (spoilt is None)


# --- Forms of the same name -----------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norms(activation: str, dtype: torch.dtype) -> None:
    """With a gate of x's dtype or of another one; the result has x's."""
    generator = torch.Generator().manual_seed(0)
    x, gate, g, w = (torch.randn(64, 48, generator=generator) for _ in range(4))
    x, gate = x.to(dtype), gate.to(dtype)
    module = Qwen3NextRMSNormGated(48).to(dtype)
    module.weight.data += w[0].to(dtype)
    module.activation = activation
    for other in (dtype, torch.float32):
        results = []
        for forward, kind in (
            (layers.RMSNormGated.forward, None),
            (Qwen3NextRMSNormGated.forward, None),
            (_exact_gated_norm, torch.float64),
        ):
            leaves = [t.detach().to(kind).requires_grad_() for t in (x, gate.to(other))]
            module.weight.grad = None
            y: Any = forward(module, *leaves)
            y.backward(g.to(y.dtype))
            results.append([y, *(leaf.grad for leaf in leaves), module.weight.grad])
        assert results[0][0].dtype == dtype
        for mine, theirs, exact in zip(*results, strict=True):
            error, allowed = (peer_fuse._rms(t - exact) for t in (mine, theirs))
            # A 16-bit norm is multiplied by the gate: docs/numerics.md allows twice.
            assert error <= 2 * allowed + 8 * 2**-24 * peer_fuse._rms(exact)


def _exact_gated_norm(module: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight.double(), 1e-6)
    name = "sigmoid" if module.activation == "sigmoid" else "silu"
    return y * getattr(torch.nn.functional, name)(gate)  # type: ignore[no-any-return]


def test_norms_without_a_weight_and_of_one_plus_weight() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.linspace(-1, 1, 48).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    bare: Any = SimpleNamespace(eps=1e-3)
    expected = torch.nn.functional.rms_norm(exact[0], (48,), eps=1e-3)
    _same_with_gradients(layers.RMSNorm.forward(bare, x), expected, [x], exact[:1])
    bare.weight = weight
    found = layers.RMSNormZeroCentered.forward(bare, x)
    _same_with_gradients(found, expected * (1 + exact[1]), [x, weight], exact)


def _same_with_gradients(found: Any, expected: Any, leaves: Any, exact: Any) -> None:
    """Compare a result and its gradients with those in float64."""
    results = [
        [y, *torch.autograd.grad(y.pow(3).sum(), inputs, retain_graph=True)]
        for y, inputs in ((found, leaves), (expected, exact))
    ]
    for mine, true in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-4)


NORMS = {name: LAYERS[name].forward for name in ("RMSNorm", "RMSNormGated", "RMSNormZeroCentered")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_that_transformers_names(dtype: torch.dtype) -> None:
    """A name does not say what a class computes: each form of a class is compared."""
    forms: dict[str, tuple[str, Any]] = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        pattern = r'@use_kernel_forward_from_hub\("(RMSNorm\w*)"\)\nclass (\w+)'
        for name, kind in re.findall(pattern, file.read_text()):
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            form = inspect.getsource(getattr(module, kind)).replace(kind, "")
            forms[form] = name, getattr(module, kind)
    assert {name for name, _ in forms.values()} == NORMS.keys()
    x, gate = torch.randn(2, 2, 5, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name, kind in forms.values():
        norm = kind(48).to(dtype)
        for parameter in norm.parameters():
            parameter.data += torch.linspace(-1, 1, 48, dtype=dtype)
        given = (x, gate) if name == "RMSNormGated" else (x,)
        close = numerics.SUMMED if dtype.itemsize == 4 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(NORMS[name](norm, *given), kind.forward(norm, *given), **close)


@of_transformers
@pytest.mark.parametrize(
    ("file", "form"),
    [(modeling_gpt_oss, "halves"), (modeling_openai_privacy_filter, "pairs")],
)
@pytest.mark.parametrize("dim", [1, 2])
def test_functions_of_one_name_that_rotate_otherwise(file: Any, form: str, dim: int) -> None:
    """Both are named rotary_pos_emb; a kernel that takes halves for granted is silently wrong."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 5, 16, generator=generator).double() for n in (4, 2))
    q, k = (t if dim == 1 else t.transpose(1, 2) for t in (q, k))
    angles = torch.randn(2, 5, 8, generator=generator).double()
    given = (q.requires_grad_(), k.requires_grad_(), angles.cos(), angles.sin())
    results = []
    for _ in range(2):
        y = file.apply_rotary_pos_emb(*given, unsqueeze_dim=dim)
        grads = torch.autograd.grad(y[0].square().sum() + y[1].pow(3).sum(), given[:2])
        results.append([*y, *grads])
        model: Any = torch.nn.Module()
        vars(model)["_kernel_funcs"] = {"rotate": file.apply_rotary_pos_emb}
        _take(model)
    assert layers.find_rotary_form(type(file.apply_rotary_pos_emb), False) == form
    torch.testing.assert_close(*results)


def test_another_rotation_runs_itself() -> None:
    """One that neither pairs halves nor neighbours."""

    class Func(torch.nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            return q * cos.unsqueeze(unsqueeze_dim), k * sin.unsqueeze(unsqueeze_dim)

    q, k, cos, sin = (torch.ones(1, *shape, 4) for shape in ((2, 3), (2, 3), (3,), (3,)))
    found = layers.RotaryPosEmb.forward(Func(), q, 2 * k, cos, 3 * sin)
    assert torch.equal(found[0], q)
    assert torch.equal(found[1], 6 * k)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss(items: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 300, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 300, (2, 9), generator=generator)
    labels[0, 3] = -100
    for more in ({}, {"shift_labels": labels.roll(-1)}, {"ignore_index": 5}):
        given = labels.masked_fill(labels == -100, 5) if "ignore_index" in more else labels
        arguments = (logits, given, 300, items)
        mine: Any = layers.ForCausalLMLoss.forward(None, *arguments, **more)  # type: ignore[arg-type]
        theirs = ForCausalLMLoss(*arguments, **more)
        assert mine.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(loss, logits)[0] for loss in (mine, theirs)]
        torch.testing.assert_close(*grads, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-8)


# --- What is said ---------------------------------------------------------------------------------


def test_what_kernelize_kept_and_what_others_put() -> None:
    """kernelize says neither; explain_fusion does."""

    class Foreign(torch.nn.Module):
        can_torch_compile = has_backward = True

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight  # which no op computes

    model = build("Llama")
    huggingface.name_layers(model)
    with huggingface.kernel_mapping():
        kernelize(model, mode=TRAINING, device="xpu")
    assert not _becomes(model)
    rows = torchweld.explain_fusion(model)
    assert ("LlamaMLP", "gated_act") in {(row.what, row.becomes) for row in rows}  # fuse would
    kept = {row.what for row in rows if "kernelize kept its own forward" in row.reason}
    assert {"LlamaMLP", "LlamaRMSNorm"} <= kept
    if NAMED:
        said = {row.what: row.reason for row in torchweld.explain_fusion(model)}
        assert "no 'rotary_pos_emb' for the device" in said["rotary_pos_emb of LlamaAttention"]
    register_kernel_mapping({"RMSNorm": {"cpu": {TRAINING: Repository(Foreign)}}})
    kernelize(model, mode=TRAINING, device="cpu")
    said = {row.what: row.reason for row in torchweld.explain_fusion(model)}
    assert said["LlamaRMSNorm"].startswith("kernelize put peer_kernels.")
    assert "Foreign in its place" in said["LlamaRMSNorm"]


@of_transformers
def test_a_deep_copy_keeps_functions_that_nothing_calls() -> None:
    model = copy.deepcopy(build("Llama"))
    _take(model)
    reasons = {row.what: row.reason for row in torchweld.explain_fusion(model)}
    assert "the model is a deep copy" in reasons["rotary_pos_emb of LlamaAttention"]


def test_only_modules_that_were_proven_have_a_name() -> None:
    """A name is a class's: another model's modules of the class are not taken."""
    first, other = build("Llama"), build("Llama")
    huggingface.name_layers(first)
    assert "forward" not in vars(_take(other).model.layers[0].mlp)
    other = build("Llama")
    other.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    named = huggingface.name_layers(other)
    assert "model.layers.1.mlp" in named
    assert "model.layers.0.mlp" not in named
    _take(other)
    taken = ["forward" in vars(layer.mlp) for layer in other.model.layers]
    assert taken == [False, True]


@pytest.mark.parametrize(
    "mode", [TRAINING, COMPILED, Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE]
)
def test_a_gpu_takes_our_layer_before_the_one_of_transformers(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers registers its mapping in every call of use_kernels, after ours."""
    monkeypatch.setattr(kernels_repos, "_find_capability", lambda: 90)
    from_hub = Repository(torch.nn.Identity)
    with huggingface.kernel_mapping():
        register_kernel_mapping({"RMSNorm": {"cuda": {mode: from_hub}}})
        repos = switches._KERNEL_MAPPING.get()["RMSNorm"]["cuda"].repos
        assert repos is not None
        found = kernels_repos._select_repository(repos, mode=mode)
    assert found is not None
    assert found[0] == Repository(layers.RMSNorm)
    assert "torchweld.huggingface (layer `RMSNorm`)" in str(found[0])


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="name_layers: model is a int"):
        huggingface.name_layers(3)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(switches, "_DISABLE_KERNEL_MAPPING", True)
        with pytest.raises(ArgumentError, match="DISABLE_KERNEL_MAPPING is 1; accepted: 0"):
            huggingface.kernel_mapping()
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    with pytest.warns(UserWarning, match=r"takes kernels >= .* is installed: its layers have no"):
        huggingface.kernel_mapping()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.16.2")
    with pytest.raises(ImportError, match=r"kernels is 0.16.2; accepted: kernels >= 0.17"):
        huggingface.kernel_mapping()

    def find_none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", find_none)
    with pytest.raises(ImportError, match="kernels is not installed"):
        huggingface.kernel_mapping()
