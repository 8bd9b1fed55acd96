"""The planner: the work of a model, its cost on devices, and the search."""
