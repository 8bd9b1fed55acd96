"""Annex: the mean of tensors over processes from their signs, with errors that are carried over.

The optimizers of `optim/one_bit` call it, and users as `torchweld.distributed.OneBitAllReduce`.
"""
