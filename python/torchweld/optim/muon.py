"""Muon, with AdamW or Lion for parameters that are not hidden matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.batch import Batch, Stepped, Task, Tensor, Tensors
from torchweld.ops.optimizer.cautious import agree, oppose
from torchweld.ops.optimizer.orthogonal import QUINTIC
from torchweld.ops.optimizer.passes import Exchange, Part, Pass, over_all
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import FusedOptimizer, Group, moments_of
from torchweld.optim._codecs import Moments, State
from torchweld.optim._matrices import find_iteration, find_regions
from torchweld.optim._options import CautiousOptions, takes
from torchweld.optim._owners import Owners
from torchweld.optim.adam import ADAM
from torchweld.optim.lion import LION


class MuonSettings(NamedTuple):
    """As csrc/core/muon.h has them."""

    momentum: float
    weight_decay: float
    nesterov: bool
    cautious_decay: bool = False  # decay only where the step does not oppose the parameter


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, s: MuonSettings
) -> Stepped:
    if not moments:
        decayed = p * (1 - lr * s.weight_decay).to(p.dtype)
        p = torch.where(oppose(g, p), p, decayed) if s.cautious_decay else decayed
        return p - g * lr.to(p.dtype), []
    momentum = moments[0] + (g - moments[0]) * (1 - s.momentum)
    return g + (momentum - g) * s.momentum if s.nesterov else momentum, [momentum]


class _MuonRule(Rule):
    """A step in two halves: `handed_on` is the task of the first one.

    The first half takes buffers for parameters and overwrites them with directions. The second one
    takes the orthogonalised directions for gradients, and has no moments.
    """

    def _passes(self) -> tuple[Pass, ...]:
        self._absmaxes_op = self._define("_absmaxes", ["new_absmaxes"])
        return (
            Pass(self._find_new_absmaxes, Exchange.LARGEST, lambda task: bool(task.batch.splits)),
            Pass(self._find_directions, Exchange.ORTHOGONAL),
            Pass(self._mask, Exchange.SUM, lambda task: task.ratios_of is not None),
            Pass(self._move),
        )

    def _find_new_absmaxes(self, task: Task) -> Iterable[Part]:
        task.handed_on = _begin(task)
        return self._find_absmaxes(task.handed_on)

    def _find_directions(self, task: Task) -> Iterable[Part]:
        first = task.handed_on = task.handed_on or _begin(task)
        self._step(first)
        return map(over_all, _directions(first.batch), task.batch.wholes)

    def _mask(self, task: Task) -> Iterable[Part]:
        """Leave only what agrees with the gradient, and count it."""
        batch = task.batch
        counts = []
        for u, g in zip(_directions(task.handed_on.batch), batch.grads, strict=True):
            agreed = agree(u, g) if task.grad_factor is None else agree(u, g * task.grad_factor)
            u.masked_fill_(~agreed, 0)
            counts.append(agreed.sum(dtype=torch.float64))
        task.sums = torch.stack(counts).view(-1, 1)
        return map(over_all, task.sums, batch.wholes) if batch.is_sharded else ()

    def _move(self, task: Task) -> Iterable[Part]:
        batch, first = task.batch, task.handed_on.batch
        if task.sums is not None:
            assert task.ratios_of is not None
            roots = task.sums[:, 0].sqrt()
            ratios = task.ratios_of(roots, roots)
            for u, ratio in zip(_directions(first), ratios, strict=True):
                u.mul_(ratio.to(u.dtype))
        if first.masters:
            torch._foreach_copy_(first.params, first.masters)
        moved = Batch(
            params=batch.params,
            grads=first.params,
            masters=batch.masters,
            steps=batch.steps,
            rounding_offsets=batch.rounding_offsets,
            companions=batch.companions,
            wholes=batch.wholes,
        )
        self.step(replace(task, batch=moved, grad_factor=None, handed_on=None, sums=None))
        task.handed_on = task.sums = None
        return ()


def _begin(task: Task) -> Task:
    """The task of the first half, with buffers for the directions."""
    batch = task.batch
    # An element that 8-bit momentum skips keeps what the buffer has.
    make = torch.zeros_like if batch.absmaxes else torch.empty_like
    grads = [g.detach() for g in batch.grads]
    contiguous = torch.contiguous_format
    # Sixteen bits are too few for directions: their norms and sums are taken later.
    narrow = grads[0].dtype in (torch.bfloat16, torch.float16)
    wide = [make(g, dtype=torch.float32, memory_format=contiguous) for g in grads if narrow]
    count = torch.zeros((), dtype=torch.float32, device=grads[0].device)  # of no use here
    directions = replace(
        batch,
        params=[make(g, memory_format=contiguous) for g in grads],
        masters=wide,
        steps=[count] * len(grads),
        rounding_offsets=[],
        companions=[],
    )
    return replace(task, batch=directions, handed_on=None, average_rate=None)


def _directions(batch: Batch) -> Tensors:
    return batch.masters or batch.params


MUON = _MuonRule(
    "muon",
    MuonSettings,
    moments={"momentum_buffer": True},
    update=_update,
)


_RULES: dict[str, Rule] = {"muon": MUON, "adamw": ADAM, "lion": LION}
_BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99)}
# Options that torch's groups lack; a group has only the options in use.
_OPTIONS: dict[str, Any] = {
    "algorithm": "standard",
    "ns_dtype": None,
    "heads": None,
    "split_sizes": None,
    "split_dim": 0,
    "maximize": False,
    "capturable": False,
}
_IGNORED = {"foreach", "fused", "differentiable"}


class _TorchsMuon(torch.optim.Muon):
    """torch.optim.Muon that also takes stacks of matrices, and vectors for other rules."""

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        asked = {
            name: value
            for name, default in _OPTIONS.items()
            if (value := settings.pop(name, default)) != default
        }
        settings = {key: value for key, value in settings.items() if key not in _IGNORED}
        # torch checks its own arguments.
        of_torch = settings
        coefficients = settings["ns_coefficients"]
        if isinstance(coefficients, (tuple, list)) and len(coefficients) != 3:
            of_torch = settings | {"ns_coefficients": QUINTIC}
        torch.optim.Muon([torch.empty(0, 0, device="cpu")], **of_torch)
        torch.optim.Optimizer.__init__(self, params, settings | asked)


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
        ns_dtype: the dtype of the iteration; None is bfloat16, or float32 on a CPU that has no
            units for bfloat16. Norms are taken before, in float64.
        heads: the number of matrices of equal size into which the rows of a packed projection are
            divided; or a number for each of split_sizes.
        split_sizes: the numbers of rows of the matrices in a packed projection.
        split_dim: 1 if heads and split_sizes divide columns.
        options: as in torch.optim and Adam.

    States are made with the optimizer, so that checkpoints have the same keys on all ranks.
    Parameters may be DTensors of any placement: each matrix is gathered on one device that steps
    it, and the result has the bits of a single device.
    """

    @takes(CautiousOptions)
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
        ns_dtype: torch.dtype | None = None,
        heads: int | Sequence[int] | None = None,
        split_sizes: Sequence[int] | None = None,
        split_dim: int = 0,
        **options: Unpack[CautiousOptions],
    ) -> None:
        self._owners = Owners()

    def __getstate__(self) -> State:
        return super().__getstate__() | {"_owners": Owners()}

    def state_dict(self) -> State:
        """Return a state like torch's, without dtypes: full state_dicts refuse them."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if group.get("ns_dtype") is not None:
                group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")
        return saved

    def _adopt(self, state_dict: State) -> State:
        adopted = super()._adopt(state_dict)
        for group in adopted["param_groups"]:
            name = group.get("ns_dtype")
            if isinstance(name, str):
                group["ns_dtype"] = getattr(torch, name, name)
        return adopted

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
    _takes_complex = False

    _rule = MUON

    def _run(self, tasks: list[Task]) -> None:
        for rule in _RULES.values():
            of_rule = [task for task in tasks if isinstance(task.settings, rule.settings)]
            if of_rule:
                passes.run(rule.passes, of_rule, self._exchange)

    def _exchange(self, kind: passes.Exchange, parts: Iterable[passes.Part]) -> None:
        if kind is not passes.Exchange.ORTHOGONAL:
            return super()._exchange(kind, parts)
        places = self._find_places()
        ordered = sorted(parts, key=lambda part: places[part.param][1])
        groups = [self.param_groups[places[part.param][0]] for part in ordered]
        self._owners.orthogonalize(type(self).__name__, list(zip(ordered, groups, strict=True)))

    def _shared_settings(self, group: Group, except_for: Collection[str] = ()) -> list[Any]:
        return [_rule_of(group), self._settings(group, None)]

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return moments_of(_RULES[_rule_of(group)], 2)  # no amsgrad's

    def _settings(self, group: Group, batch: Batch | None) -> tuple[Any, ...]:
        return _RULES[_rule_of(group)].read_settings({"decoupled_weight_decay": True, **group})

    def _saves_count(self, group: Group, p: torch.Tensor, state: State) -> bool:
        return _rule_of(group) != "muon" or self._codec_of(p).rounds(p)


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
