"""Overrides for torchtitan 0.3: its modules, loss and optimizers by torchweld.

    torchrun -m torchtitan.train --module llama3 --config llama3_8b \\
      --override.imports torchweld.titan.rms_norm,torchweld.titan.feed_forward

Each function below is one override. torchtitan logs what each replaced, and refuses two that claim
the same node. Parameters keep their names and shapes, so that checkpoints do not change.

* `rms_norm`, `feed_forward`, `rope`, `grouped_experts`, `loss` and `linear_loss` claim exactly
  torchtitan's own classes; a model's subclasses keep their own forward.
* Sums are in float32 and results are rounded once, as torchtitan's are, or fewer times.
* DTensors take torchtitan's path in `rope`, `loss` and `linear_loss`, as do losses of a vocabulary
  that tensor parallelism shares. Norms and feed-forwards take them.
* On a device without a kernel of ours the functions run torch; `torchweld.explain` says which runs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchweld import functional, optim, state
from torchweld.errors import ArgumentError

try:
    from torchtitan import __version__ as _version
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
except ImportError as error:
    message = f"torchweld.titan: {error}; accepted: torchtitan 0.3 with what it requires"
    raise ImportError(message) from error
if not _version.startswith("0.3."):
    told = f"torchtitan is {_version}, and ours stand for the classes of 0.3"
    warnings.warn(f"torchweld.titan: {told}: compare the losses of some steps", stacklevel=2)


class WeldedRMSNorm(RMSNorm):
    """torchtitan's RMSNorm, computed by torchweld.functional.rms_norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """RMSNorm's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class WeldedFeedForward(FeedForward):
    """torchtitan's SwiGLU, whose product with the activation is one pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """FeedForward's."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(functional.gated_act(self.w1(x), self.w3(x), activation="silu"))


class WeldedGroupedExperts(GroupedExperts):
    """torchtitan's experts: its grouped GEMMs, and one pass for the product between them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """GroupedExperts'."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> Any:  # noqa: N803
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        w1, w3, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        offsets = torch.cumsum(num_tokens_per_expert_E, 0, dtype=torch.int32)

        def multiply(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            b = weight.bfloat16().transpose(-2, -1)
            product: torch.Tensor = self._grouped_mm(A=a, B_t=b, offs=offsets)
            return product

        x = x_RD.bfloat16()
        hidden = functional.gated_act(multiply(x, w1), multiply(x, w3), activation="silu")
        return multiply(hidden, w2).type_as(x_RD)


def _rotate(module: Any, q: Any, k: Any, positions: Any, interleaved: bool) -> Any:
    """The rotation by our op, or None if tensors are shared among devices."""
    if any(isinstance(t, DTensor) for t in (q, k, module.cache)):
        return None
    cache = module._reshape_cache(q, positions)
    if interleaved:
        cos, sin = cache.real, cache.imag
    else:
        cos, sin = cache.chunk(2, -1)
    if q.dtype == torch.float64:
        cos, sin = cos.double(), sin.double()
    return functional.rotary_embedding_qk(q, k, cos, sin, interleaved=interleaved, seq_dim=-3)


class WeldedComplexRoPE(ComplexRoPE):
    """torchtitan's rotation of neighbouring columns, of queries and keys in one pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """ComplexRoPE's."""

    def forward(self, query: Any, key: Any, positions: Any = None) -> Any:
        found = _rotate(self, query, key, positions, True)
        return super().forward(query, key, positions) if found is None else found


class WeldedCosSinRoPE(CosSinRoPE):
    """torchtitan's rotation of halves, of queries and keys in one pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """CosSinRoPE's."""

    def forward(self, query: Any, key: Any, positions: Any = None) -> Any:
        found = _rotate(self, query, key, positions, False)
        return super().forward(query, key, positions) if found is None else found


def _shares_vocabulary(*tensors: Any) -> bool:
    if any(isinstance(t, DTensor) for t in tensors):
        return True
    return bool(get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1)


def _scale(loss: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, Any]]:
    return (loss if tokens is None else loss / tokens), {}


class WeldedCrossEntropyLoss(CrossEntropyLoss):
    """torchtitan's loss of logits, in one pass forward and one backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """CrossEntropyLoss'."""

    def __call__(
        self, pred: Any, labels: Any, global_valid_tokens: Any = None, **kwargs: Any
    ) -> Any:
        if _shares_vocabulary(pred, labels):
            return super().__call__(pred, labels, global_valid_tokens, **kwargs)
        flat = pred.flatten(0, 1).float(), labels.flatten(0, 1)
        return _scale(functional.cross_entropy(*flat, reduction="sum"), global_valid_tokens)


class WeldedLinearLoss(ChunkedLossWrapper):
    """torchtitan's loss by chunks of the sequence, as one op with its gradients.

    Chunks are of rows, by memory; `num_chunks` has no effect. A head with hooks, a bias or shards,
    as of FSDP, and a `loss_fn` other than the cross entropy take torchtitan's path.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """ChunkedLossWrapper's."""

    def __call__(
        self, pred: Any, labels: Any, global_valid_tokens: Any = None, **loss_inputs: Any
    ) -> Any:
        head: Any = self.lm_head
        plain = isinstance(self.loss_fn, CrossEntropyLoss) and not loss_inputs
        plain = plain and head is not None and not state.count_hooks(head, state.CALL_HOOKS)
        weight = getattr(head, "weight", None)
        if not plain or head.bias is not None or _shares_vocabulary(pred, labels, weight):
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        rows = pred.flatten(0, 1), head.weight, labels.flatten(0, 1)
        loss = functional.linear_cross_entropy(*rows, reduction="sum")
        return _scale(loss.float(), global_valid_tokens)


class WeldedOptimizersContainer(OptimizersContainer):
    """torchtitan's optimizers, with any name of `torchweld.optim`; its own DistMuon stays."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """OptimizersContainer's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        own = getattr(optim, name, None)
        if isinstance(own, type) and issubclass(own, torch.optim.Optimizer):
            return own
        return OptimizersContainer._resolve_optimizer_factory(name)


@override(target=RMSNorm.Config, exact=True, description="RMSNorm in one pass each way.")
def rms_norm(cfg: Any) -> Any:
    """RMSNorm by `torchweld.functional.rms_norm`."""
    return derive(cfg, WeldedRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="SwiGLU's product in one pass.")
def feed_forward(cfg: Any) -> Any:
    """FeedForward by `torchweld.functional.gated_act`."""
    return derive(cfg, WeldedFeedForward.Config)


@override(target=GroupedExperts.Config, exact=True, description="Experts' product in one pass.")
def grouped_experts(cfg: Any) -> Any:
    """GroupedExperts by its own grouped GEMMs and `torchweld.functional.gated_act`."""
    return derive(cfg, WeldedGroupedExperts.Config)


_ROPES: dict[Any, Any] = {
    ComplexRoPE.Config: WeldedComplexRoPE,
    CosSinRoPE.Config: WeldedCosSinRoPE,
}


@override(target=RoPE.Config, description="Rotary embeddings of q and k in one pass.")
def rope(cfg: Any) -> Any:
    """ComplexRoPE and CosSinRoPE by `torchweld.functional.rotary_embedding_qk`.

    A model's own subclass stays as it is, which the log shows.
    """
    found = _ROPES.get(type(cfg))
    return cfg if found is None else derive(cfg, found.Config)


@override(target=CrossEntropyLoss.Config, exact=True, description="Cross entropy in one pass.")
def loss(cfg: Any) -> Any:
    """CrossEntropyLoss by `torchweld.functional.cross_entropy`."""
    return derive(cfg, WeldedCrossEntropyLoss.Config)


@override(target=ChunkedLossWrapper.Config, exact=True, description="Head and loss as one op.")
def linear_loss(cfg: Any) -> Any:
    """ChunkedLossWrapper by `torchweld.functional.linear_cross_entropy`."""
    return derive(cfg, WeldedLinearLoss.Config)


@override(target=OptimizersContainer.Config, exact=True, description="torchweld.optim.")
def optimizers(cfg: Any, **more: Any) -> Any:
    """Optimizers of `torchweld.optim` by the names in the groups.

    Args:
        cfg: torchtitan's config.
        more: arguments for each of them, as `{"state_dtype": "8bit"}`.
    """
    if cfg.implementation == "fused_opt_states_bf16":
        accepted = '\'fused\' with {"state_dtype": "bfloat16"}'
        raise ArgumentError("optimizers", "implementation", repr(cfg.implementation), accepted)
    names = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    more = {key: names.get(value, value) for key, value in more.items()}
    groups = [
        replace(group, optimizer_kwargs={**group.optimizer_kwargs, **more})
        for group in cfg.param_groups
    ]
    return derive(cfg, WeldedOptimizersContainer.Config, param_groups=groups)
