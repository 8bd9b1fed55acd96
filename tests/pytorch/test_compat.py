"""Aliases of torchweld.compat that need no other package; tests/peers has those that do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest

from torchweld import numerics
from torchweld.compat import liger, trl, varlen, verl
from torchweld.errors import ArgumentError


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_cross_entropy_of_verl(reduction: str) -> None:
    hidden, weight, labels = _draw(6, 16), _draw(40, 16, seed=1), torch.arange(6) * 5
    found, entropy = verl.linear_cross_entropy(hidden, weight, labels, 0.7, reduction)
    log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0]
    expected = expected if reduction == "none" else getattr(expected, reduction)()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    grads = [
        torch.autograd.grad(a.sum() + 0.3 * b.sum(), (hidden, weight))
        for a, b in ((found, entropy), (expected, -(log_p.exp() * log_p).sum(-1)))
    ]
    torch.testing.assert_close(*grads)


def test_five_steps_of_verl_lose_the_same() -> None:
    """A policy's loss with an entropy bonus, in float32, against the formula of verl's text."""

    def explicit(hidden: Any, weight: Any, labels: Any, temperature: float) -> Any:
        log_p = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def train(function: Any) -> list[float]:
        x, weight, body = (
            _draw(*shape, seed=seed).detach().float().requires_grad_()
            for seed, shape in enumerate(((24, 16), (40, 16), (16, 16)))
        )
        labels, advantage = torch.arange(24), torch.linspace(-1, 2, 24)
        optimizer = torch.optim.AdamW([weight, body], lr=1e-2)
        losses = []
        for _ in range(5):
            log_p, entropy = function(torch.tanh(x @ body), weight, labels, 0.7)
            loss = -(log_p * advantage).mean() - 0.1 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    expected = train(explicit)
    assert expected[-1] < expected[0]
    assert train(verl.linear_cross_entropy) == pytest.approx(expected, rel=1e-5)


def test_linear_cross_entropy_of_verl_names_what_it_refuses() -> None:
    given = (_draw(2, 4), _draw(8, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ArgumentError, match="reduction is 'batch'; accepted: 'none', 'sum' or"):
        verl.linear_cross_entropy(*given, reduction="batch")
    with pytest.raises(ArgumentError, match="dist_process_group is a object; accepted: None"):
        verl.linear_cross_entropy(*given, dist_process_group=object())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
@pytest.mark.parametrize("lengths", [((5, 1, 9), None), ((5, 1, 9), (7, 4, 9))])
def test_varlen_attn(window: tuple[int, int], lengths: tuple[Any, Any]) -> None:
    """Against sdpa of each document, whose last query sees its last key."""
    queries, keys = lengths[0], lengths[1] or lengths[0]
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in (queries, keys)]
    q, k, v = _draw(sum(queries), 4, 8), _draw(sum(keys), 2, 8, seed=1), _draw(sum(keys), 2, 8)
    given = (starts[0], None if lengths[1] is None else starts[1], max(queries), max(keys))
    found, lse = varlen.varlen_attn(
        q, k, v, *given, window_size=window, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    parts, sums = [], []
    for rows, columns in zip(
        *(torch.arange(n).split([*e]) for n, e in ((sum(queries), queries), (sum(keys), keys))),
        strict=True,
    ):
        one = [t.transpose(0, 1) for t in (q[rows], k[columns], v[columns])]
        one[1:] = [t.repeat_interleave(2, 0) for t in one[1:]]
        at = torch.arange(len(rows))[:, None] + len(columns) - len(rows)
        far = torch.arange(len(columns)) - at
        seen = (window[0] < 0) | (far >= -window[0])
        seen = seen & ((window[1] < 0) | (far <= window[1]))
        scores = (one[0] @ one[1].mT / 8**0.5).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(-1) @ one[2]).transpose(0, 1))
        sums.append(scores.logsumexp(-1).t())
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected, **numerics.SUMMED_SMALL)
    torch.testing.assert_close(lse.double(), torch.cat(sums), **numerics.SUMMED_SMALL)
    grads = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected)]
    torch.testing.assert_close(*grads, **numerics.SUMMED_SMALL)


def test_varlen_attn_has_the_arguments_of_torch() -> None:
    theirs = inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters
    mine = inspect.signature(varlen.varlen_attn).parameters
    if "is_causal" in theirs:
        pytest.skip("an older torch has other arguments")
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name in mine if name in positional] == positional
    assert theirs.keys() == mine.keys()


def test_varlen_attn_names_what_it_refuses() -> None:
    q, k, starts = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), torch.tensor([0, 4]).int()
    with pytest.raises(ArgumentError, match="key is of 1 heads; accepted: 2 heads, or fewer with"):
        varlen.varlen_attn(q, k, k, starts, None, 4, 4)
    with pytest.raises(ArgumentError, match="seqused_k is a Tensor; accepted: None"):
        varlen.varlen_attn(q, q, q, starts, None, 4, 4, seqused_k=starts)
    with pytest.raises(ArgumentError, match=r"query is of shape \[1, 4, 2, 8\]"):
        varlen.varlen_attn(q[None], q, q, starts, None, 4, 4)


@pytest.mark.parametrize("picked", [None, 3])
@pytest.mark.parametrize("trains", [True, False])
def test_functions_of_trl_on_logits(picked: int | None, trains: bool) -> None:
    """Log-probabilities and entropies, at once and apart, of rows without a mask's zeros."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 9, 40, generator=generator)).requires_grad_()
    index = torch.randint(0, 40, (2, 9) if picked is None else (2, 9, picked), generator=generator)
    mask = torch.arange(18).view(2, 9) % 3
    log_p = (logits.double() / 0.7).log_softmax(-1)
    kept = (mask != 0).unsqueeze(-1)
    columns = index.view(2, 9, -1)
    chosen = (log_p.gather(-1, columns) * kept).view(index.shape)
    entropy = (-(log_p.exp() * log_p).sum(-1, keepdim=True) * kept)[..., 0]
    plain = logits.double().log_softmax(-1)
    expected = [chosen, entropy, -(plain.exp() * plain).sum(-1)]
    found = list(trl.selective_log_softmax_and_entropy(logits, index, trains, 0.7, mask))
    found.append(trl.entropy_from_logits(logits))
    assert torch.equal(found[0], trl.selective_log_softmax(logits, index, 0.7, mask))
    assert found[1].requires_grad is trains
    grads = []
    for results in (found, expected):
        parts = results if trains else [results[0], results[2]]
        total = sum(part.double().square().sum() for part in parts)
        grads.append(torch.autograd.grad(total, logits)[0].double())
    for pair in (*zip(found, expected, strict=True), grads):
        torch.testing.assert_close(*[t.double() for t in pair], **numerics.SUMMED)


def test_functions_of_trl_and_liger_name_what_they_refuse() -> None:
    x, index = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ArgumentError, match="temperature is 0; accepted: a number above 0"):
        trl.selective_log_softmax(x, index, temperature=0)
    given = (x, torch.zeros(9, 8), None, index, 1.0)
    with pytest.raises(ArgumentError, match="outputs is 'logits'; accepted: names of"):
        trl.ChunkedLogProbFunction.apply(*given, outputs=("logits",))
    with pytest.raises(ArgumentError, match="casting_mode is 'none'; accepted: 'llama' or 'gemma'"):
        liger.LigerRMSNorm(8, casting_mode="none")
    with pytest.raises(ArgumentError, match="return_z_loss is True; accepted: False"):
        liger.liger_cross_entropy(x, index, return_z_loss=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        liger.liger_cross_entropy(x, index, z=True)
    with pytest.raises(ArgumentError, match=r"accum_dtype is torch.float64; accepted: None or"):
        liger.LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float64)(given[1], x, index)
    with pytest.raises(ArgumentError, match="unsqueeze_dim is 2; accepted: 1"):
        liger.liger_rotary_pos_emb(*[torch.zeros(1, 1, 2, 8)] * 4, unsqueeze_dim=2)
