"""Ops on a residual stream: bias, dropout, addition, norm."""
