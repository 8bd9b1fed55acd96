"""Warm calls: guards find the cached call that a call is like, and its function decides nothing."""
