"""What ops are made of: the one place that knows jax's machinery, the library, and the checks of arguments."""
