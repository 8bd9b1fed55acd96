"""Linear layers with what precedes and follows their GEMMs fused."""
