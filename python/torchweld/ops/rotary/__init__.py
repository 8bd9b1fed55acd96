"""Rotary embeddings."""
