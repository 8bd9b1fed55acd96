"""Annex: searchers that sample choices, where `enumerate_all` bounds all of them.

`plan_for` calls them for `searcher="mcmc"` and `searcher="reinforce"`.
"""
