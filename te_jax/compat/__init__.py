"""TransformerEngine's module paths and names over te_jax, for programs that are written for it.

    python -m te_jax.compat run PROGRAM.py ...      # runs a program that imports transformer_engine, unedited
    python -m te_jax.compat check PROGRAM.py ...    # lists what in it te_jax does not serve

    import te_jax.compat
    te_jax.compat.install()                         # from here on, `import transformer_engine` finds te_jax
    import transformer_engine.jax as te

`te_jax.compat.transformer_engine` is that package; it can be imported by this name too. docs/migration.md says what
differs.
"""

INTERFACE = "2.20.2"  # The release of TransformerEngine whose names and defaults the package has.

from te_jax.compat._install import install as install  # noqa: E402

__all__ = ["INTERFACE", "install"]
