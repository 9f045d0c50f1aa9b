"""What the small examples share: a training loop for one precision or two, and its options."""
