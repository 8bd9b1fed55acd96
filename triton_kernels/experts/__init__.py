"""Layers of experts, and their routing."""
