"""What programs say of GEMMs that communicate, which te_jax leaves to XLA."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from te_jax.compat.transformer_engine_jax import JAXX_Collective_Op


class CollectiveOp(Enum):
    """What a GEMM would do as well as multiplying."""

    NONE = JAXX_Collective_Op.NONE
    ALL_GATHER = JAXX_Collective_Op.ALL_GATHER
    REDUCE_SCATTER = JAXX_Collective_Op.REDUCE_SCATTER

    @property
    def is_all_gather(self) -> bool:
        return self is CollectiveOp.ALL_GATHER

    @property
    def is_reduce_scatter(self) -> bool:
        return self is CollectiveOp.REDUCE_SCATTER

    @property
    def is_none(self) -> bool:
        return self is CollectiveOp.NONE


_UNDOES = {
    CollectiveOp.NONE: CollectiveOp.NONE,
    CollectiveOp.ALL_GATHER: CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.REDUCE_SCATTER: CollectiveOp.ALL_GATHER,
}


@dataclass(frozen=True)
class CollectiveOpSet:
    """What the GEMMs of the forward and of the backward pass would do."""

    forward: CollectiveOp
    backward: CollectiveOp

    @staticmethod
    def create(forward_collective_op: CollectiveOp) -> "CollectiveOpSet":
        """The set whose backward pass undoes the forward one."""
        return CollectiveOpSet(forward_collective_op, _UNDOES[forward_collective_op])


noop_collective_op_set: CollectiveOpSet = CollectiveOpSet.create(CollectiveOp.NONE)


def collective_gemm_bootstrap(*args: Any, **kwargs: Any) -> None:
    """Does nothing: te_jax has no communicators of its own to make."""
