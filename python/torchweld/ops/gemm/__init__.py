"""GEMMs of torch's with what precedes and follows them fused."""
