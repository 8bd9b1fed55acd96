"""What a run's results look like: tables, plots, and a comparison of two runs."""
