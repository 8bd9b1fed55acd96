"""Models that are timed: blocks, transformers' own, and a GPT that learns."""
