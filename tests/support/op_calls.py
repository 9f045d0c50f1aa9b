"""A case of an op as a function of its operands, and how close two results of an op are."""

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.core.op import Op


def call(case, args):
    """The case as a function of its present operands."""
    present = [a is not None for a in args]

    def fn(*given):
        given = iter(given)
        return case(*(next(given) if p else None for p in present))

    return fn


def close(got, want, which="", term=None):
    """Equal but for the order of f32 sums: their error grows with the number of terms, at most 1024 here, of the size
    `term`, by default of the largest result. FP8 results may then fall on the other side of a rounding boundary: one
    step of the type, 2**-3 (E4M3) or 2**-2 (E5M2), and among its subnormal numbers the smallest of them."""
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for (path, g), w in zip(got, want):
        said = f"{which} {jax.tree_util.keystr(path)}"
        assert g.shape == w.shape and g.dtype == w.dtype, said
        if jnp.issubdtype(g.dtype, jnp.integer):
            np.testing.assert_array_equal(g, w, said)
            continue
        info = jnp.finfo(g.dtype)
        step = info.eps if info.bits < 32 else 1024 * 2.0**-24
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        size = np.abs(w[np.isfinite(w)]).max(initial=0) if term is None else term
        atol = float(info.smallest_subnormal) if info.bits == 8 else step * (size if step < 1e-3 else 1e-6)
        np.testing.assert_allclose(g, w, rtol=step, atol=atol, err_msg=said)


def forget_traces(*jitted):
    """What ops mean, and these functions, are traced anew from now on. `jax.clear_caches` forgets all programs of the
    tests before, too: to free them took 15 s, and those that come again are compiled again."""
    for made in (Op._compile, Op._reference_of, Op._mappable_call):
        made.cache_clear()
    for function in jitted:
        function.clear_cache()
