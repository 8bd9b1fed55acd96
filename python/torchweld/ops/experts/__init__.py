"""Mixtures of experts: the router's choice of experts, and the experts' feed-forward blocks."""
