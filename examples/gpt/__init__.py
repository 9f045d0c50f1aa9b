"""The pieces of examples/train_gpt.py, one job each."""
