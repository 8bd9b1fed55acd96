"""The benchmarks of losses and of whole models, on small ones."""

from __future__ import annotations

import pytest
import torch

import torchweld
from torchweld.bench import losses, models


def test_losses_take_turns_and_have_a_peak() -> None:
    """All contenders compute the same gradients; eager's peak has the logits."""
    given = losses.make(700, 40, 16, torch.float32)
    ways = losses.contenders(*given)
    grads = [way() for way in ways.values()]
    for found in grads[1:]:
        for mine, theirs in zip(found, grads[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    rows = losses.measure(ways, 2)
    assert [name for name, _, _ in rows] == [*ways]
    assert all(seconds > 0 for _, seconds, _ in rows)
    assert rows[0][2] >= 40 * 700 * 4


def test_the_page_of_models_has_what_was_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    report = torchweld.explain_fusion(torchweld.fuse(model))
    timed = [
        {"contender": name, "total": total, "peak_bytes": peak, "speed_up": 100 / total}
        for name, total, peak in (
            ("eager", 100.0, 5e6),
            ("compiled", 80.0, None),
            ("fused", 50.0, 2e6),
        )
    ]
    untimed = [{"contender": "eager", "peak_bytes": 5e6}, {"contender": "fused", "peak_bytes": 2e6}]
    page = models.write_page(
        [models.Row("A", timed, report), models.Row("B", untimed, report)], "5.0"
    )
    assert "| A | 100 | 80 | 50 | 2.00x | 5 | 2 |" in page
    assert "| B |  |  |  |  | 5 | 2 |" in page
    page = models.write_page([models.Row("B", untimed, report)], "5.0")
    assert "| B | 5 | 2 |" in page
    assert "This run took no times." in page
    page = models.write_page([models.Row("A", timed, report)], "5.0")
    assert "**A**: 1 linear_act (gelu), 1 layer_norm" in page
    assert "transformers 5.0" in " ".join(page.split())
    assert len(models.MODELS) == 16


def test_a_page_keeps_the_rows_of_models_that_are_not_measured() -> None:
    report = torchweld.explain_fusion(torchweld.fuse(torch.nn.Sequential(torch.nn.LayerNorm(8))))

    def make(name: str, peak: float) -> models.Row:
        steps = [{"contender": way, "peak_bytes": peak} for way in ("eager", "fused")]
        return models.Row(name, steps, report)

    before = models.write_page([make("ViT", 1e6), make("Llama", 2e6)], "5.0")
    page = models.write_page([make("Llama", 3e6), make("OLMoE", 4e6)], "5.0", before)
    rows = [line for line in page.splitlines() if line.endswith(" |")][1:]
    assert rows == ["| Llama | 3 | 3 |", "| ViT | 1 | 1 |", "| OLMoE | 4 | 4 |"]
    assert page.count("1 layer_norm") == 3
    with pytest.raises(ValueError, match="other versions"):
        models.write_page([make("Llama", 3e6)], "5.1", before)
