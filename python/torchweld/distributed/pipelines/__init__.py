"""Pipelines: stages, their steps, weight stashing and a record of time."""
