"""The equations of a jaxpr."""

from collections.abc import Iterator

from jax.extend.core import JaxprEqn, jaxprs_in_params

from te_jax.core.op import ops


def equations(jaxpr) -> Iterator[JaxprEqn]:
    """All of a jaxpr and of those within it, but what lies inside of te_jax's ops."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in [] if eqn.primitive.name in ops else jaxprs_in_params(eqn.params):
            yield from equations(inner)
