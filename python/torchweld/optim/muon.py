"""Muon, with AdamW or Lion for parameters that are not hidden matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from torchweld.errors import ArgumentError
from torchweld.names import StateName
from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.adam import ADAM, AdamSettings
from torchweld.ops.optimizer.batch import Batch, Task
from torchweld.ops.optimizer.lion import LION, LionSettings
from torchweld.ops.optimizer.muon import MUON, MuonSettings
from torchweld.ops.optimizer.orthogonal import QUINTIC
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import CAUTIOUS, FusedOptimizer, Group, collect_arguments
from torchweld.optim._codecs import SIGNED, STEP, UNSIGNED, Moments, State
from torchweld.optim._gather import Gathering
from torchweld.optim._matrices import find_iteration, find_regions
from torchweld.optim._owners import Owners

_RULES: dict[str, Rule] = {"muon": MUON, "adamw": ADAM, "lion": LION}
_BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99)}
# Options that torch's groups lack; a group has only the options in use.
_OPTIONS: dict[str, Any] = {
    "algorithm": "standard",
    "ns_dtype": torch.bfloat16,
    "heads": None,
    "split_sizes": None,
    "split_dim": 0,
    "maximize": False,
    "capturable": False,
}


class _TorchsMuon(torch.optim.Muon):
    """torch.optim.Muon that also takes stacks of matrices, and vectors for other rules."""

    def __init__(self, params: ParamsT, options: dict[str, Any], **settings: Any) -> None:
        # torch checks its own arguments.
        of_torch = settings
        coefficients = settings["ns_coefficients"]
        if isinstance(coefficients, (tuple, list)) and len(coefficients) != 3:
            of_torch = settings | {"ns_coefficients": QUINTIC}
        torch.optim.Muon([torch.empty(0, 0, device="cpu")], **of_torch)
        torch.optim.Optimizer.__init__(self, params, settings | options)


class Muon(FusedOptimizer, _TorchsMuon):
    """torch.optim.Muon: momentum whose matrices are orthogonalised by Newton-Schulz iterations.

    A parameter with three or more dimensions is a stack of matrices, its last two dimensions.
    Vectors, embeddings and heads belong in groups with another rule: `muon_groups` makes them.

    Args:
        params: parameters, or groups of them, as in torch.optim. A group may have
            rule="adamw" or "lion" in place of "muon", with betas, eps and weight_decay of its own.
            Other arguments can be set per group.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            torch.optim.Muon; adjust_lr_fn="match_rms_adamw" is the scaling of Moonlight and Kimi.
            ns_coefficients may have three numbers for each step.
        algorithm: "standard"; "gram", the same polynomials of the smaller Gram matrix, with fewer
            operations for matrices that are not square; or "polar_express", which has its own
            coefficients.
        ns_dtype: the dtype of the iteration. Norms are taken before, in float64.
        heads: the number of matrices of equal size into which the rows of a packed projection are
            divided; or a number for each of split_sizes.
        split_sizes: the numbers of rows of the matrices in a packed projection.
        split_dim: 1 if heads and split_sizes divide columns.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        state_dtype, master_weights, min_quantized_size, stochastic_rounding, max_grad_norm: as in
            Adam.

    States are made with the optimizer, so that checkpoints have the same keys on all ranks.
    Parameters may be DTensors of any placement: each matrix is gathered on one device that steps
    it, and the result has the bits of a single device.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        algorithm: str = "standard",
        ns_dtype: torch.dtype = torch.bfloat16,
        heads: int | Sequence[int] | None = None,
        split_sizes: Sequence[int] | None = None,
        split_dim: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | StateName = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        arguments = collect_arguments(locals())
        if differentiable:
            raise ArgumentError(type(self).__name__, "differentiable", "True", "False")
        for name in ("foreach", "fused", "differentiable"):
            arguments.pop(name)
        options = {name: arguments.pop(name) for name in _OPTIONS}
        asked = {name: value for name, value in options.items() if value != _OPTIONS[name]}
        super().__init__(options=asked, **arguments)
        self._owners = Owners()

    def __getstate__(self) -> State:
        return super().__getstate__() | {"_owners": Owners()}

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):
            param_group = self._with_defaults(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except Exception:
            del self.param_groups[-1]
            raise
        for p in group["params"]:
            if not p.is_complex() and not p.is_meta:
                self._complete(self.state[p], p, self._codec_of(p), self._all_moments(group, p))

    def _with_defaults(self, group: Group) -> Group:
        """A group with the defaults of its rule."""
        rule = group.get("rule", "muon")
        if rule not in _RULES:
            raise ArgumentError(type(self).__name__, "rule", repr(rule), " | ".join(_RULES))
        if rule == "muon":
            return group
        return {"betas": _BETAS[rule], "eps": 1e-8} | group

    def _check_group(self, group: Group) -> None:
        if _rule_of(group) != "muon":
            return
        name = type(self).__name__
        find_iteration(name, group)
        if group.get("split_dim", 0) not in (0, 1):
            raise ArgumentError(name, "split_dim", repr(group["split_dim"]), "0 or 1")
        for p in group["params"]:
            if p.ndim < 2:
                raise ValueError(
                    "Muon only supports 2D parameters whereas we found a parameter with size:"
                    f' {p.size()}; give vectors a group with rule="adamw"'
                )
            find_regions(name, p.shape, group)

    # --- The step -----------------------------------------------------------------------------

    _is_cautious_rule = True

    def _rule(self) -> Rule:
        return MUON

    def _run(self, tasks: list[Task]) -> None:
        for rule in _RULES.values():
            of_rule = [task for task in tasks if isinstance(task.settings, rule.settings)]
            if of_rule:
                passes.run(rule.passes, of_rule, self._exchange)

    def _exchange(self, kind: passes.Exchange, parts: Iterable[passes.Part]) -> None:
        if kind is not passes.Exchange.ORTHOGONAL:
            return super()._exchange(kind, parts)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        numbers = {p: number for number, p in enumerate(groups)}
        ordered = sorted(parts, key=lambda part: numbers[part.param])
        self._owners.orthogonalize(
            type(self).__name__, [(part, groups[part.param]) for part in ordered]
        )

    def _shared_settings(self, group: Group, except_for: Collection[str] = ()) -> list[Any]:
        rule = _rule_of(group)
        return [rule, *(group[name] for name in _SETTINGS[rule])]

    def _gatherings(self) -> list[Gathering]:
        gatherings = super()._gatherings()
        for gathering in gatherings:
            if any(kind.is_complex for kind in gathering.kinds()):
                raise RuntimeError("Muon does not support complex parameters")
        return gatherings

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return _MOMENTS[_rule_of(group)]

    def _settings(self, group: Group, batch: Batch) -> tuple[Any, ...]:
        decay, rule = float(group["weight_decay"]), _rule_of(group)
        cautious, spares = (group.get(name, False) for name in CAUTIOUS)
        if rule == "muon":
            return MuonSettings(float(group["momentum"]), decay, bool(group["nesterov"]), spares)
        beta1, beta2 = map(float, group["betas"])
        if rule == "lion":
            return LionSettings(beta1, beta2, decay, cautious, spares)
        return AdamSettings(beta1, beta2, float(group["eps"]), decay, True, cautious, spares)

    def state_dict(self) -> State:
        """Return a state like torch's, which does not count the steps of matrices.

        The count is saved only for stochastic rounding, which depends on it.
        """
        saved = super().state_dict()
        states = saved["state"]
        for group, of_group in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, key in zip(group["params"], of_group["params"], strict=True):
                if _rule_of(group) == "muon" and not self._codec_of(p).rounds(p) and key in states:
                    states[key] = {name: v for name, v in states[key].items() if name != STEP}
        return saved


_MOMENTS: dict[str, Moments] = {
    "muon": {"momentum_buffer": SIGNED},
    "adamw": {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED},
    "lion": {"exp_avg": SIGNED},
}
_SETTINGS = {
    "muon": ("weight_decay", "momentum", "nesterov"),
    "adamw": ("weight_decay", "betas", "eps"),
    "lion": ("weight_decay", "betas"),
}


def _rule_of(group: Group) -> str:
    return group.get("rule", "muon")


def muon_groups(
    model: torch.nn.Module,
    *,
    rest: str = "adamw",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    verbose: bool = True,
    **rest_settings: Any,
) -> list[Group]:
    """Divide a model's parameters into the groups of `Muon`: hidden matrices, and the rest.

    The rest are vectors, the weights of embeddings and convolutions, and heads. A weight is a head
    if it is tied to an embedding, if its module has a name like lm_head, or if its module is the
    model's last linear layer and a direct child of the model. Frozen parameters are in no group.

    Args:
        model: the model; its parameters may be DTensors.
        rest: the rule of the rest, "adamw" or "lion".
        include: names of parameters that are always matrices for Muon.
        exclude: names of parameters that are always of the rest.
        verbose: whether to print the parameters of each group.
        rest_settings: lr, betas, eps and weight_decay of the rest.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for argument, names in (("include", include), ("exclude", exclude)):
        if unknown := [name for name in names if name not in named]:
            raise ArgumentError("muon_groups", argument, repr(unknown[0]), "a parameter's name")
    if vector := next((name for name in include if named[name].ndim < 2), None):
        raise ArgumentError("muon_groups", "include", f"{vector!r}, a vector", "matrices")
    if rest not in _BETAS:
        raise ArgumentError("muon_groups", "rest", repr(rest), " | ".join(_BETAS))
    others = _find_others(model)
    of_rest = [
        name
        for name, p in named.items()
        if name in exclude or (name not in include and (p.ndim < 2 or p in others))
    ]
    hidden = [name for name in named if name not in of_rest]
    if verbose:
        for rule, names in (("muon", hidden), (rest, of_rest)):
            count = sum(named[name].numel() for name in names)
            print(f"{rule}: {count} elements in {len(names)} parameters: {', '.join(names)}")
    groups: list[Group] = [
        {"params": [(name, named[name]) for name in names], **settings}
        for names, settings in ((hidden, {}), (of_rest, {"rule": rest} | rest_settings))
    ]
    return [group for group in groups if group["params"]]


_HEADS = ("head", "lm_head", "classifier", "output", "unembed", "score", "embed_out")


def _find_others(model: torch.nn.Module) -> set[torch.Tensor]:
    """Find the weights of embeddings, convolutions and heads."""
    others: set[torch.Tensor] = set()
    last: torch.nn.Module | None = None
    for name, module in model.named_modules():
        is_other = isinstance(
            module, (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.modules.conv._ConvNd)
        )
        if is_other or name.rpartition(".")[2] in _HEADS:
            others |= set(module.parameters(recurse=False))
        if isinstance(module, torch.nn.Linear):
            last = module
    # The last linear layer is a head only if it stands outside the blocks that repeat.
    if last is not None and any(last is child for child in model.children()):
        others |= set(last.parameters(recurse=False))
    return others
