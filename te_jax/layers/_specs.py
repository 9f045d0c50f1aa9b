"""Shardings of a dense layer's results on an Explicit mesh: what is gathered, and where a sum is left scattered.

Under Auto axes the compiler decides this from the shardings around the layer; on Explicit axes types must say it. A
mesh axis that splits x[*B, *C] along B and also kernel[*C, *F] along F cannot split the product along both. If it
splits the first axis of B, the batch, it shards data (FSDP), and the kernel is gathered. If it splits another axis of
B, the sequence, it serves tensor parallelism, and x is gathered. A role in the MeshResource in force goes before this,
which serves arrays [s, b, ...] too.
"""

from jax.sharding import PartitionSpec

from te_jax.core.types import on_explicit_mesh
from te_jax.sharding import current_mesh_resource
from te_jax.sharding.constraints import entries, spec_of


def dense_spec(x, kernel, contract: int, out=None, residual=None) -> PartitionSpec | None:
    """The sharding of x[*B, *C] . kernel[*C, *F] from their types; None off Explicit meshes.

    out:      a type of the product's shape, or None: the stream of tokens that the product belongs to. It is sharded as
              that is: a sum over mesh axes that split C is left scattered, features that the kernel splits otherwise
              are gathered. Only an axis of B that `out` leaves whole stays split as x splits it.
    residual: where `out` is None, a type of what is added to the product, or None. The product is split as that is, and
              where it is whole, as x and the kernel split it.
    """
    if not on_explicit_mesh(x):
        return None
    xs, ks, batch = entries(x), entries(kernel), x.ndim - contract
    lead, features = list(xs[:batch]), list(ks[contract:])
    in_features = set().union(*features)
    for i, names in enumerate(lead):
        lead[i] = tuple(n for n in names if n not in in_features or _shards_data(n, i))
    stream = residual if out is None else out
    if stream is not None and stream.shape == (*x.shape[:batch], *kernel.shape[contract:]):
        wanted = entries(stream)
    else:
        wanted = [()] * (batch + len(features))
    taken = set().union(*wanted)
    lead = [want or tuple(n for n in names if n not in taken) for want, names in zip(wanted, lead)]
    taken = taken.union(*lead)
    features = [tuple(n for n in names if n not in taken) for names in features]
    if out is None:
        return spec_of([*lead, *(want or names for want, names in zip(wanted[batch:], features))])
    return spec_of([*lead, *wanted[batch:]])


def _shards_data(name: str, axis: int) -> bool:
    resource = current_mesh_resource()
    if resource is not None and name in (resource.fsdp_resource, resource.dp_resource):
        return True
    if resource is not None and name in (resource.tpsp_resource, resource.tp_resource):
        return False
    return axis == 0
