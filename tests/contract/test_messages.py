"""What errors and `explain` say: the reasons, the nearest name, values cut to a line."""

from __future__ import annotations

import pytest
import torch

import torchweld
from torchweld import functional

X = torch.ones(4, 8)


def test_a_backend_that_cannot_serve_says_why() -> None:
    with torchweld.use_backend("cuda"), pytest.raises(torchweld.BackendError, match="cuda backend"):
        functional.layer_norm(X, [8])
    with pytest.raises(torchweld.ArgumentError, match="eager or cpu or cuda or triton"):
        torchweld.use_backend("opencl").__enter__()


def test_explain_names_the_choice_and_the_reasons() -> None:
    small = torchweld.explain(functional.layer_norm, X, [8])
    assert small.chosen == "eager"
    assert "too small to gain" in small.reasons["cpu"]
    large = torchweld.explain("rms_norm", torch.ones(512, 512), [512], eps=1e-6)
    assert large.chosen == "cpu"
    assert set(large.reasons) == {"eager", "cuda", "triton"}
    assert "rms_norm runs on cpu" in str(large)
    with torchweld.use_backend("eager"):
        assert torchweld.explain("rms_norm", torch.ones(512, 512), [512]).chosen == "eager"
    with pytest.raises(torchweld.ArgumentError, match="layer_norm, linear_act, linear_batch_norm"):
        torchweld.explain("norm", X)


@pytest.mark.parametrize(
    ("given", "suggested"), [("Gelu", "gelu"), ("sillu", "silu"), ("zzz", None), ("", None)]
)
def test_a_misspelt_name_is_answered(given: str, suggested: str | None) -> None:
    with pytest.raises(torchweld.ArgumentError) as caught:
        torchweld.functional.bias_act(torch.ones(4), activation=given)
    said = f"; did you mean {suggested!r}?"
    assert str(caught.value).endswith(said if suggested else "identity")


def test_a_name_of_torch_is_answered_in_full() -> None:
    """'bfloat16' was asked whether it meant 'bfloat16'."""
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(torchweld.ArgumentError, match=r"did you mean torch\.bfloat16\?"):
        torchweld.optim.AdamW([p], state_dtype="bfloat16")


def test_a_long_value_is_shortened() -> None:
    """A tensor in the place of a list has thousands of numbers."""
    with pytest.raises(
        torchweld.ArgumentError, match=r"normalized_shape is \[1, 1.*\[\.\.\.\];"
    ) as caught:
        functional.rms_norm(torch.ones(4, 5000), torch.ones(5000, dtype=torch.int64))
    assert len(str(caught.value)) < 400
