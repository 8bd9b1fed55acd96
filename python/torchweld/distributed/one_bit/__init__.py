"""Annex: a hook with which DDP sends gradients as signs, and a test of a group's link.

Users call `torchweld.distributed.one_bit_hook`; the command `torchweld link` calls the test.
"""
