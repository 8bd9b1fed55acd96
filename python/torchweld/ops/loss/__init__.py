"""Cross entropy and log-probabilities, of logits and of a linear layer."""
