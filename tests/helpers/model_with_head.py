"""A small model with a head and a loss, as in transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

WORDS = 53


class Output(NamedTuple):
    """As a language model returns it."""

    loss: Any
    logits: Any


class LanguageModel(nn.Module):
    """As in transformers: the forward calls a head, and CrossEntropyLoss of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=WORDS)
        self.body, self.lm_head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, input_ids: Any, labels: Any = None, return_dict: bool = True) -> Any:
        hidden = self.body(input_ids)
        logits = self.lm_head(getattr(hidden, "last_hidden_state", hidden))
        loss = None
        if labels is not None:
            loss_function = nn.CrossEntropyLoss()
            loss = loss_function(logits.view(-1, self.config.vocab_size), labels.view(-1))
        return Output(loss=loss, logits=logits)
