"""Annex: 1-bit Adam and 1-bit LAMB, which exchange their momenta as signs over slow links.

Users call them as `torchweld.optim.OneBitAdam` and `OneBitLAMB`.
"""
