"""Attention over sequences that processes share."""
