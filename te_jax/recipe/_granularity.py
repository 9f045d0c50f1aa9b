"""What shares a scale: the one fact about a recipe's scales by which ops and layers differ."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Granularity:
    """The numbers of a tensor that share a scale.

    block:  how many neighbours along the axis that a GEMM contracts share one; 0: the whole tensor does.
    square: blocks of weights are block x block, the same in both layouts; else blocks are 1 x block in each layout.
    law:    (name, value) pairs, the attributes by which an op computes the scale of a block from its amax.
    """

    block: int = 0
    square: bool = False
    law: tuple[tuple[str, object], ...] = ()

    @property
    def shared(self) -> bool:
        """Whether both layouts of an activation or gradient have the same scales, so that one is the other's
        transpose."""
        return self.block == 0

    @property
    def free_axes(self) -> int:
        """How many axes that are not contracted a tensor must have: blocks of the transposed layout lie along one."""
        return int(self.block > 0)


TENSOR = Granularity()
