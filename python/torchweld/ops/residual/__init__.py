"""What a residual stream goes through: bias, dropout, addition, norm."""
