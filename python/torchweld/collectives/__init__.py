"""What exchanges between processes share: a wire that checks, and runs of tensors."""
