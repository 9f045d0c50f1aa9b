"""`transformer_engine.common.recipe`: recipes with the arguments of TransformerEngine, which are te_jax's recipes."""

from dataclasses import dataclass, fields
from typing import Any

from te_jax import recipe as _recipe
from te_jax.compat._absent import GetAttr, absent
from te_jax.core.check import check_names, warn_once
from te_jax.recipe import Format as Format
from te_jax.recipe import Recipe as Recipe

__getattr__: GetAttr = absent("transformer_engine.common.recipe")


@dataclass(frozen=True)
class MMParams:
    """How a GEMM adds its partial sums: in full precision, or in the faster mode of the tensor cores."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a tensor is quantized. te_jax honours `power_2_scale` and `amax_epsilon`, of all tensors of a GEMM alike."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _allow(where: str, name: str, value, allowed, way_out: str) -> None:
    if value != allowed:
        raise ValueError(f"{where}: {name} is {value!r}; {way_out}.")


def _ignore(where: str, given: dict, names: tuple[str, ...]) -> None:
    """Takes `names` out of `given`, with a warning: TransformerEngine drops them without one."""
    for name in names:
        if name in given:
            warn_once(where, f"{name} is {given.pop(name)!r}, which has no meaning in this recipe; leave it out.")


def _split(*gemms: MMParams) -> tuple[bool, ...]:
    return tuple(gemm.use_split_accumulator for gemm in gemms)


_NO_OVERRIDE = "te_jax runs the backward pass as the recipe says; use override_linear_precision for high precision"


class _Kinds:
    """Which recipe it is, asked of the class or of an instance."""

    backward_override = None

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


class _Gemms(_Kinds):
    """The parameters of the three GEMMs, by TransformerEngine's names."""

    @property
    def fp8_gemm_fprop(self) -> MMParams:
        return MMParams(self.split_accumulator[0])

    @property
    def fp8_gemm_dgrad(self) -> MMParams:
        return MMParams(self.split_accumulator[1])

    @property
    def fp8_gemm_wgrad(self) -> MMParams:
        return MMParams(self.split_accumulator[2])


class DelayedScaling(_Kinds, _recipe.DelayedScaling):
    """`te_jax.recipe.DelayedScaling` with TransformerEngine's order of arguments: te_jax's further ones go by
    keyword."""

    def __init__(
        self,
        margin: float = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: Any = "max",
        scaling_factor_compute_algo: Any = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        **others: Any,
    ) -> None:
        _allow("DelayedScaling", "backward_override", backward_override, None, _NO_OVERRIDE)
        _check_fields(DelayedScaling, others)
        super().__init__(
            margin=margin,
            fp8_format=fp8_format,
            amax_history_len=amax_history_len,
            amax_compute_algo=amax_compute_algo,
            scaling_factor_compute_algo=scaling_factor_compute_algo,
            reduce_amax=reduce_amax,
            fp8_dpa=fp8_dpa,
            fp8_mha=fp8_mha,
            **others,
        )


class Float8CurrentScaling(_Gemms, _recipe.Float8CurrentScaling):
    """`te_jax.recipe.Float8CurrentScaling` with the arguments of TransformerEngine.

    use_power_2_scales and the parameters of the three GEMMs are honoured.
    """

    def __init__(
        self,
        use_power_2_scales: bool = False,
        fp8_format: Format = Format.HYBRID,
        fp8_gemm_fprop: MMParams = MMParams(False),
        fp8_gemm_dgrad: MMParams = MMParams(),
        fp8_gemm_wgrad: MMParams = MMParams(),
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        **others: Any,
    ) -> None:
        _ignore("Float8CurrentScaling", others, ("margin", "amax_history_len", "amax_compute_algo"))
        _allow("Float8CurrentScaling", "backward_override", backward_override, None, _NO_OVERRIDE)
        _check_fields(Float8CurrentScaling, others)
        given = dict(
            power_2_scale=use_power_2_scales,
            split_accumulator=_split(fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad),
        )
        super().__init__(fp8_format=fp8_format, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, **(given | others))

    @property
    def use_power_2_scales(self) -> bool:
        return self.power_2_scale


class Float8BlockScaling(_Gemms, _recipe.Float8BlockScaling):
    """`te_jax.recipe.Float8BlockScaling` with the arguments of TransformerEngine, which has no such recipe for JAX.
    Blocks are 1 x 128 of activations and gradients, 128 x 128 of weights."""

    def __init__(
        self,
        use_f32_scales: bool = False,
        fp8_format: Format = Format.E4M3,
        x_block_scaling_dim: int = 1,
        w_block_scaling_dim: int = 2,
        grad_block_scaling_dim: int = 1,
        fp8_gemm_fprop: MMParams = MMParams(),
        fp8_gemm_dgrad: MMParams = MMParams(),
        fp8_gemm_wgrad: MMParams = MMParams(),
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        **others: Any,
    ) -> None:
        where = "Float8BlockScaling"
        _allow(where, "backward_override", backward_override, None, _NO_OVERRIDE)
        for name, value, allowed in (
            ("x_block_scaling_dim", x_block_scaling_dim, 1),
            ("w_block_scaling_dim", w_block_scaling_dim, 2),
            ("grad_block_scaling_dim", grad_block_scaling_dim, 1),
        ):
            _allow(where, name, value, allowed, f"te_jax has blocks of dimension {allowed} there; leave it out")
        gemms = _split(fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad)
        _allow(where, "use_split_accumulator of a GEMM", all(gemms), True, "block scales need full sums: use True")
        _check_fields(Float8BlockScaling, others)
        super().__init__(
            use_f32_scales=use_f32_scales, fp8_format=fp8_format, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, **others
        )


class MXFP8BlockScaling(_Kinds, _recipe.MXFP8BlockScaling):
    """`te_jax.recipe.MXFP8BlockScaling` with the arguments of TransformerEngine."""

    margin = 0

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        enable_2d_quantization: bool = False,
        **others: Any,
    ) -> None:
        where = "MXFP8BlockScaling"
        _allow(where, "margin", margin, 0, "scales are powers of 2 of each block's amax; leave it 0")
        _allow(where, "enable_2d_quantization", enable_2d_quantization, False, "blocks are 1 x 32; leave it False")
        _allow(where, "backward_override", backward_override, None, _NO_OVERRIDE)
        _check_fields(MXFP8BlockScaling, others)
        super().__init__(fp8_format=fp8_format, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, **others)


class NotServed(_Kinds, Recipe):
    """The base of recipes that are there only for `isinstance`."""

    way_out = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{type(self).__name__}: te_jax has no such recipe; {self.way_out}.")


class NVFP4BlockScaling(NotServed):
    """Not served: raises ValueError."""

    way_out = "FP4 needs Blackwell and is out of te_jax's scope: use MXFP8BlockScaling or Float8CurrentScaling"


class CustomRecipe(NotServed):
    """Not served: raises ValueError."""

    way_out = "write a subclass of te_jax.recipe.Recipe instead, which says the scales of all tensors"


def _check_fields(cls: type[Recipe], given: dict) -> None:
    """Raises TypeError for a keyword that is neither of TransformerEngine's nor of te_jax's recipe."""
    own = list(cls.__init__.__annotations__)
    check_names(cls.__name__, given, [field.name for field in fields(cls)] + own)
