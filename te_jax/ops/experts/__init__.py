"""Mixtures of experts: which expert a token goes to, tokens in the order of their experts, and the rows of experts."""
