"""Activations, with a bias or a gate."""
