"""A training state that holds FP8 state, and optimizers that leave FP8 state as it is."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from te_jax.core.check import FUNCTION, Kind, check, show
from te_jax.flax._common import join_trees, split_tree
from te_jax.flax.kernels import KERNEL_COLLECTION, WGRAD_COLLECTION
from te_jax.flax.moe import BIAS_COLLECTION, update_expert_bias
from te_jax.gradients import max_fp8_metas, value_and_grad
from te_jax.layers.parameters import gradient_targets
from te_jax.optim import apply_updates, beside
from te_jax.optim.master import check_masters
from te_jax.state.fp8 import FP8_COLLECTION, STATE_COLLECTIONS
from te_jax.state.metas import (
    check_collections,
    check_same_state,
    map_jointly,
    recipe_with_state,
    states_in,
    update_fp8_metas,
)
from te_jax.state.misplaced import check_no_stray, keys_of, stray_state, warn_of_impossible


class TrainState(train_state.TrainState):
    """Flax's `TrainState` (step i32[], apply_fn, params, tx, opt_state) with FP8 state and other collections.

        with te_jax.autocast(True, recipe):
            collections, params = flax.core.pop(model.init(key, x), "params")
            state = TrainState.create(
                apply_fn=model.apply, params=params, tx=tx, collections=collections
            )

        @partial(jax.jit, donate_argnums=0)
        def train_step(state, batch):
            def loss_fn(params, fp8):
                variables = {"params": params, **fp8, **state.collections}
                return loss(state.apply_fn(variables, batch))

            with te_jax.autocast(True, recipe):
                step = te_jax.value_and_grad(loss_fn, argnums=(0, 1))
                value, grads = step(state.params, state.fp8)
                return state.apply_gradients(grads=grads), value

    Only `params` go through `tx`: no clipping, decay or moment sees a scale, and the optimizer's state is the same with
    FP8 and without. `with_fp8` turns a bf16 state into an FP8 state and back.

    Parameters that live in FP8 (`fp8_params`) are trained with `tx=te_jax.optim.master_weights(...)`.

    The biases of experts (`MoEBlock`), the collection `expert_bias`, are in `fp8` too, with FP8 and without: its
    gradient moves them as well.

    Raises ValueError, also in `replace`, for names in `fp8` or `collections` that would hide `params` or `fp8` from a
    loss.
    """

    # {"fp8_metas": scales and amax histories, f32}, or in "_overwrite_with_gradient"; {} without FP8. And
    # {"expert_bias": ...} of a model that has it.
    fp8: Mapping[str, Any]
    # Under optax.MultiSteps, `fp8` as microbatches so far would leave it, and their counts of tokens; else {}.
    fp8_microbatch: Mapping[str, Any]
    collections: Mapping[str, Any]  # Other collections by name, such as batch_stats.

    def __post_init__(self) -> None:
        if not (isinstance(self.fp8, Mapping) and isinstance(self.collections, Mapping)):
            return  # jax rebuilds states around any objects.
        if unknown := set(self.fp8) - {*states_in(self.fp8), BIAS_COLLECTION}:
            raise ValueError(
                f"TrainState: fp8 has {sorted(unknown)}; pass {{}}, or {{{FP8_COLLECTION!r}: ...}} as `init` returns "
                "it."
            )
        shadows = {name: _WITH_FP8 for name in (*states_in(self.collections), BIAS_COLLECTION)} | _NO_COLLECTIONS
        if held := next((name for name in shadows if name in self.collections), None):
            raise ValueError(
                f"TrainState: collections holds {held!r}, which would be read instead of what is trained; "
                f"{shadows[held]}."
            )

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable,
        params: Any,
        tx: Any,
        collections: Mapping[str, Any] | None = None,
        masters: Any = None,
        **kwargs: Any,
    ) -> "TrainState":
        """The state before the first step.

        collections: All that `init` returned in addition to `params`, by name; FP8 state among them becomes `fp8`.
        masters:     The parameters that `fp8_params` quantized to `params`: the master copies start from them. None:
                     from the dequantized values of `params`.
        kwargs:      Fields of a subclass.

        Raises ValueError if `tx` holds more than one `optax.MultiSteps`, for parameters in FP8 unless `tx` is
        `te_jax.optim.master_weights`, for FP8 state among `params` or outside of its collection, and for `params` among
        `collections`; TypeError for collections that are no dict and for a `tx` that is no optimizer.
        """
        _check_params(params)
        fp8, others = {}, {}
        check("TrainState.create", "tx", tx, _OPTIMIZER)
        check("TrainState.create", "collections", collections, _OTHER_COLLECTIONS)
        check_no_stray("TrainState.create", "collections", collections or {})
        for name, collection in (collections or {}).items():
            (fp8 if name in (*states_in(collections), BIAS_COLLECTION) else others)[name] = collection
        start = params if masters is None else beside(params, masters)
        fields = dict(apply_fn=apply_fn, params=start, tx=tx, fp8={}, fp8_microbatch={}, collections=others)
        state = super().create(**fields, **kwargs).with_fp8(fp8)
        state = state.replace(params=params, step=jnp.zeros((), jnp.int32))  # A Python int would be traced twice.
        check_masters("TrainState.create", params, state.opt_state)
        return state

    def with_fp8(self, fp8: Mapping[str, Any]) -> "TrainState":
        """The state with `fp8` instead of its FP8 state.

        fp8: {} for bf16, {"fp8_metas": ...} of a fresh state for FP8, or `te_jax.convert_fp8_metas(state.fp8, recipe)`
             to go on with another recipe.

        Biases of experts stay, unless `fp8` has others. The amaxes of earlier microbatches of an unfinished step
        (`optax.MultiSteps`) are dropped. Raises ValueError for other keys, ValueError or TypeError for malformed FP8
        state. Warns of FP8 state that no step leaves behind.
        """
        check_collections("TrainState.with_fp8", fp8, "fp8")
        warn_of_impossible("TrainState.with_fp8", fp8)
        fp8 = self._biases | dict(fp8)
        several = _multi_steps(self.opt_state) is not None
        # A copy, since donation takes each buffer once.
        return self.replace(fp8=fp8, fp8_microbatch=jax.tree.map(jnp.copy, fp8) if several else {})

    @property
    def variables(self) -> dict[str, Any]:
        """All variables that `apply_fn` reads: {"params": ..., "fp8_metas": ..., ...}."""
        return {"params": self.params, **self.fp8, **self.collections}

    def apply_gradients(
        self, *, grads: Any, tx_args: Mapping[str, Any] | None = None, expert_bias_rate: float = 1e-3, **kwargs: Any
    ) -> "TrainState":
        """The state after one step, or after one microbatch of `optax.MultiSteps`.

        Call it under the autocast of the loss.

        grads:   The gradients with respect to (params, fp8), as `value_and_grad(loss_fn, argnums=(0, 1))` and
                 `accumulate_gradients` return them. The gradient of fp8 is its next value. It is checked and repaired
                 (`te_jax.update_fp8_metas`), and tensors that the backward pass did not reach keep their state. If
                 autodiff added up uses that `te_jax.value_and_grad` would have combined, no scale becomes too large,
                 and sums do not grow from step to step where all uses of a tensor saw an amax, or none did. Without FP8
                 state the gradient of params is enough.
        tx_args: Keyword arguments for `tx.update`, such as the `value` of `optax.contrib.reduce_on_plateau`.
        expert_bias_rate: By how much the biases of experts move, a number or f32[] (`te_jax.flax.update_expert_bias`).
        kwargs:  Fields to replace, such as `collections` by the updated ones.

        Under `optax.MultiSteps` scales, histories and biases of experts change when the parameters do, by the largest
        amax and the tokens of all microbatches that `should_skip_update_fn` does not reject.

        Raises TypeError for gradients of another form, ValueError for gradients of another FP8 state and for histories
        of another length than the recipe in force has.
        """
        grads, fp8 = self._split_gradients(grads)
        if self.fp8:
            fp8 = update_fp8_metas(map_jointly(_undo_sum, fp8, self.fp8), previous=self.fp8)
        state = self._optimize(grads, tx_args or {}, kwargs)
        before, after = _multi_steps(self.opt_state), _multi_steps(state.opt_state)
        moved = lambda fp8: update_expert_bias({**fp8, **self._biases}, fp8, expert_bias_rate)
        if not self.fp8 or before is None:
            return state.replace(fp8=moved(fp8))
        both = jax.tree.map(lambda *of: jnp.stack(of), self.fp8_microbatch, fp8)
        where = lambda condition, *trees: jax.tree.map(partial(jnp.where, condition), *trees)
        so_far = where(before.mini_step == 0, fp8, _of_microbatches(self.fp8, both))
        stepped = after.gradient_step != before.gradient_step
        skipped = ~stepped & (after.mini_step == before.mini_step)  # `should_skip_update_fn` rejected it.
        so_far = where(skipped, self.fp8_microbatch, so_far)
        return state.replace(fp8=where(stepped, moved(so_far), self.fp8), fp8_microbatch=so_far)

    @property
    def _biases(self) -> dict:
        """The collection of the biases of experts, if there is one."""
        return {name: self.fp8[name] for name in self.fp8 if name == BIAS_COLLECTION}

    def _optimize(self, grads, tx_args, others) -> "TrainState":
        """The state after `tx`, with the fields `others` replaced and `fp8` unchanged.

        The FP8 state that Flax's own modules hold in params does not go through `tx`: its gradient replaces it, as in
        the step of Flax's `TrainState`.
        """
        check_masters("TrainState.apply_gradients", self.params, self.opt_state)
        of_flax = isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads
        dparams, params = (tree["params"] if of_flax else tree for tree in (grads, self.params))
        updates, opt_state = self.tx.update(dparams, self.opt_state, params, **tx_args)
        params = apply_updates(params, updates)
        params = {**grads, "params": params} if of_flax else params
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **others)

    def _split_gradients(self, grads):
        """(gradient of params, next fp8), the latter in the containers of `self.fp8`. Raises as `apply_gradients`."""
        if not self.fp8 and jax.tree.structure(grads) == jax.tree.structure(
            jax.eval_shape(gradient_targets, self.params)
        ):
            return grads, {}
        if not (isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[1], Mapping)):
            raise TypeError(
                f"TrainState.apply_gradients: grads is {type(grads).__name__}, but FP8 state moves by its gradient; "
                "pass what value_and_grad(loss_fn, argnums=(0, 1))(state.params, state.fp8) returns."
            )
        grads, new = grads
        fp8 = {name: new[name] for name in self.fp8 if name in new}
        if (got := jax.tree.structure(fp8)) != (held := jax.tree.structure(self.fp8)):
            raise ValueError(
                f"TrainState.apply_gradients: the gradient of fp8 is {got}, but the state holds {held}; differentiate "
                "with respect to state.fp8."
            )
        for name, metas in ((name, self.fp8[name]) for name in states_in(self.fp8)):
            named = "the gradient of fp8", fp8[name], "the state", metas
            check_same_state("TrainState.apply_gradients", *named, name)
        return grads, fp8

    def accumulate_gradients(
        self, loss_fn: Callable, microbatches: Any, wgrads: Mapping[str, Any] | None = None
    ) -> tuple[jax.Array, Any]:
        """(loss, grads) of k microbatches, one after the other (`lax.scan`).

        loss_fn:      (params, fp8, microbatch) -> the loss, f32[].
        microbatches: A tree of arrays [k, ...].
        wgrads:       The collection of `te_jax.flax.wgrads`: the gradients of its kernels are added up inside their
                      GEMMs. `fp8` then holds the collection next to the FP8 state, for `apply`. A kernel gets NaN for
                      its gradient unless each microbatch uses it exactly once: `loss_fn` must not leave the collection
                      out, nor each device under `shard_map` use the kernel. Under `jax.vmap` it is an error. These
                      kernels are constants of the loss, which has to hand them to their modules unchanged: a term of
                      weight decay, a factor or `lax.stop_gradient` is not in the gradient.

        Returns the mean loss f32[] and the gradients for `apply_gradients`: the mean gradients of params, added up in
        f32, and the FP8 state of the largest amaxes, also over several uses of one module within a loss; for biases of
        experts the counts of all tokens.

        The activations of one microbatch are in memory at a time. Call it inside a jitted step, since each call traces
        `loss_fn` anew. Raises ValueError for wgrads of other parameters, and for microbatches that are none: scalars,
        or arrays of different first axes or of an empty one.
        """
        check("TrainState.accumulate_gradients", "loss_fn", loss_fn, FUNCTION)
        _check_microbatches(microbatches)
        wgrads = {} if wgrads is None else dict(wgrads)
        self._check_wgrads(wgrads)
        fused, params = {}, self.params
        if wgrads:
            fused, params = split_tree(params, flatten_dict(wgrads[WGRAD_COLLECTION]).__contains__)
        whole = lambda fused, others: join_trees(fused, others) if fused else others  # Without wgrads any tree will do.
        of_whole = lambda params, *others: loss_fn(whole(fused, params), *others)
        run = value_and_grad(wraps(loss_fn)(of_whole), argnums=(0, 1))

        def body(total, microbatch):
            total, wgrads = total
            loss, (grads, new) = run(params, {**self.fp8, **wgrads}, microbatch)
            fp8, wgrads = ({name: new[name] for name in of} for of in (self.fp8, wgrads))
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            uses = {path: entry.uses for path, entry in flatten_dict(wgrads).items()}
            return (total, wgrads), (loss, fp8, uses)

        like = gradient_targets(self.params)
        start = jax.tree.map(
            lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), gradient_targets(params)
        )
        (total, wgrads), (losses, fp8, uses) = lax.scan(body, (start, wgrads), microbatches)
        sums = {path[1:]: _nan_unless_used_once(entry.grad, uses[path]) for path, entry in flatten_dict(wgrads).items()}
        leaves = jax.tree.leaves(whole(unflatten_dict(sums), total))
        total = jax.tree.unflatten(jax.tree.structure(like), leaves)
        mean = jax.tree.map(lambda t, p: (t / losses.shape[0]).astype(p.dtype), total, like)
        return jnp.mean(losses), (mean, _of_microbatches(self.fp8, fp8))

    def _check_wgrads(self, wgrads):
        if wgrads and wgrads.keys() != {WGRAD_COLLECTION}:
            raise ValueError(
                f"TrainState.accumulate_gradients: wgrads has {sorted(wgrads)}; pass what te_jax.flax.wgrads returns, "
                f"{{{WGRAD_COLLECTION!r}: ...}}."
            )
        held = flatten_dict(self.params) if wgrads else {}
        if lacks := sorted("/".join(path[1:]) for path in flatten_dict(wgrads) if path[1:] not in held):
            raise ValueError(
                f"TrainState.accumulate_gradients: wgrads holds {lacks[0]}, which the state's params lack; make it of "
                "state.variables, by te_jax.flax.wgrads."
            )


def _check_microbatches(microbatches: Any):
    """Raises ValueError unless all arrays of a tree have one first axis, which is not empty."""
    where = "TrainState.accumulate_gradients: microbatches"
    way_out = "pass arrays [k, ...] of k microbatches, such as x.reshape(k, -1, *x.shape[1:])"
    leaves = jax.tree_util.tree_leaves_with_path(microbatches)
    if not leaves:
        raise ValueError(f"{where} is {show(microbatches)}, without an array; {way_out}.")
    (first, one), *_ = leaves
    for path, leaf in leaves:
        shape, name = jnp.shape(leaf), jax.tree_util.keystr(path)
        if shape[:1] in ((), (0,)):
            raise ValueError(f"{where}{name} has shape {shape}; {way_out}.")
        if shape[0] != jnp.shape(one)[0]:
            there = f"{where}{name} has shape {shape}, microbatches{jax.tree_util.keystr(first)} {jnp.shape(one)}"
            raise ValueError(f"{there}; {way_out}.")


def _of_microbatches(before, fp8):
    """`fp8`, the gradients of k microbatches stacked in front, as one: the FP8 state of the largest amaxes, and the sum
    of the tokens of experts."""
    one = max_fp8_metas(before, fp8)
    if BIAS_COLLECTION not in fp8:
        return one
    return {**one, BIAS_COLLECTION: jax.tree.map(lambda counts: jnp.sum(counts, 0), fp8[BIAS_COLLECTION])}


_OTHER_COLLECTIONS = Kind("a dict of collections by name", lambda value: value is None or isinstance(value, Mapping))
_OPTIMIZER = Kind(
    "an optax.GradientTransformation",
    lambda tx: not isinstance(tx, type) and all(callable(getattr(tx, name, None)) for name in ("init", "update")),
    hint=lambda tx: "call it first, as in optax.adam(1e-3)" if callable(tx) else "",
)

# What no TrainState has among its collections, with the way out.
_WITH_FP8 = "pass it to create or with_fp8, and leave it out here"
_NO_COLLECTIONS = {
    "params": 'leave it out, as in collections, params = flax.core.pop(variables, "params")',
    KERNEL_COLLECTION: "it holds copies of the parameters of one step: make it within each step",
    WGRAD_COLLECTION: "it holds sums of one step: pass it to accumulate_gradients",
}


def _check_params(params):
    """Raises ValueError if FP8 state is among the parameters: an optimizer would treat it as weights."""
    held = stray_state(params)
    for path in (keys_of(path) for path, _ in jax.tree.leaves_with_path(params)):
        # State of Flax's own products, which a step replaces, may stand at the top.
        names = [at for at, key in enumerate(path) if key == FP8_COLLECTION or (at and key == OVERWRITE_WITH_GRADIENT)]
        held += [path[: at + 1] for at in names]
    if held:
        raise ValueError(
            f"TrainState.create: params holds FP8 state ({'/'.join(held[0])}), which tx would change as weights; pass "
            f'params=variables["params"], and all else that `init` returned as collections={{...}}.'
        )


def _nan_unless_used_once(total, uses):
    """The gradients `total` f32[..., *C, *F], NaN for kernels that some microbatch did not use exactly once.

    uses: f32[k, ...], how often each of the k microbatches used each kernel.
    """
    right = jnp.all(uses == 1, 0)
    return jnp.where(right.reshape(right.shape + (1,) * (total.ndim - right.ndim)), total, jnp.nan)


def _undo_sum(direction, new, old):
    """The next state (scale f32[..., 1], history f32[..., L]) where `new` may be a sum over N uses, added by autodiff.

    One step drops the oldest amax of `old` and appends one: `new` decides only the newest amax, and a sum of amaxes is
    at least each of them. The scale is at most what the recipe in force makes of that. N uses that saw no amax add up
    to N times `old`, which then stays, unless one step has the same result. A history of length 1 cannot be checked,
    and a scale of 0 (no module read the tensor) is passed through.
    """
    (scale, history), (old_scale, old_history) = new, old
    if history.shape[-1] == 1:
        return scale, history
    reached = scale != 0
    moved = reached & (jnp.any(history != old_history, -1, keepdims=True) | (scale != old_scale))
    rolled = jnp.concatenate([history[..., :1], old_history[..., 2:], history[..., -1:]], -1)
    uses = jnp.round(scale / old_scale)
    copies = jnp.all(_equal_but_for_rounding(history, uses * old_history, uses), -1, keepdims=True)
    summed = (uses > 1) & copies & _equal_but_for_rounding(scale, uses * old_scale, uses)
    if (recipe := recipe_with_state()) is not None:
        law = partial(recipe.new_state, fp8_max=recipe.fp8_format.max(direction))
        amax = jnp.where(moved, rolled[..., -1:], 0.0)[..., 0]
        by_law, _ = jnp.vectorize(law, signature="(i),(n),()->(i),(n)")(old_scale, old_history, amax)
        summed &= ~_equal_but_for_rounding(scale, by_law, history.shape[-1])  # A law may add up the whole history.
        if not recipe.scale_is_of_history:  # Else update_fp8_metas bounds the scale.
            scale = jnp.where(reached, jnp.minimum(scale, by_law), scale)
    return jnp.where(summed, old_scale, scale), jnp.where(summed, old_history, jnp.where(moved, rolled, history))


def _equal_but_for_rounding(x, y, additions):
    """Whether x and y, f32 sums of so many positive terms, may be one value but for the rounding of the additions."""
    return jnp.abs(x - y) <= additions * jnp.finfo(jnp.float32).eps * jnp.abs(y)


def _multi_steps(opt_state) -> optax.MultiStepsState | None:
    """The state of the `optax.MultiSteps` in an optimizer. Raises ValueError if there are several."""
    is_one = lambda node: isinstance(node, optax.MultiStepsState)
    ones_in = lambda tree: [node for node in jax.tree.leaves(tree, is_leaf=is_one) if is_one(node)]
    found = ones_in(opt_state)
    found += [inner for one in found for inner in ones_in(one.inner_opt_state)]
    if len(found) > 1:
        raise ValueError(
            f"TrainState: tx holds {len(found)} optax.MultiSteps, so FP8 state has no one step to move with; put one "
            "around the whole optimizer."
        )
    return found[0] if found else None


def fp8_masked(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer `tx` for trees that hold FP8 state as well as parameters, as {"params": ..., "fp8_metas": ...}.

    Leaves below a key `fp8_metas`, `_overwrite_with_gradient` or `expert_bias`, and FP8 state below any other, stay out
    of norms, moments and decay, and their updates are 0: the next FP8 state is its gradient, not a sum with it. A step
    is

        updates, opt_state = tx.update(grads, opt_state, variables)
        variables = optax.apply_updates(variables, updates)
        new_fp8 = te_jax.update_fp8_metas({"fp8_metas": grads["fp8_metas"]})
        variables = te_jax.update_collections(new_fp8, variables)
        # Where there are experts with a bias
        variables = te_jax.flax.update_expert_bias(variables, grads, rate)

    `TrainState` needs no such wrapper: only parameters go through its optimizer. Raises TypeError for a `tx` that is no
    optimizer.
    """
    check("fp8_masked", "tx", tx, _OPTIMIZER)

    def labels(tree):
        strays = {*stray_state(tree)}
        kept = {*STATE_COLLECTIONS, BIAS_COLLECTION}
        in_fp8 = lambda path: not kept.isdisjoint(keys_of(path)) or keys_of(path) in strays
        return jax.tree_util.tree_map_with_path(lambda path, _: "fp8" if in_fp8(path) else "other", tree)

    return optax.partition({"fp8": optax.set_to_zero(), "other": tx}, labels)
