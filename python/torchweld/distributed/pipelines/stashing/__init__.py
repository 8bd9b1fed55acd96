"""Annex: PipeDream and PipeDream-2BW, whose stages keep versions of their weights.

`Training` makes its stages for the schedules "pipedream", "vertical" and "2bw".
"""
