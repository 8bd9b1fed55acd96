"""Pipelines: stages, their steps and a record of time; weight stashing is an annex."""
