"""The FP8 state of tensors: scales and histories, the autocast, and what is done with a whole model's."""
