"""The benchmark runner and the evidence that it recorded."""
