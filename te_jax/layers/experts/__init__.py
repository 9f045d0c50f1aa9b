"""Layers of experts, over rows of groups."""
