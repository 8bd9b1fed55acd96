"""The loss of large vocabularies."""
