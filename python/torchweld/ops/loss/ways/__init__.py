"""What serves a loss: a file for each way, and find.py, which names the one that does."""
