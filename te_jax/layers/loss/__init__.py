"""The head and its loss."""
