"""Attention and its gradients in float64 numpy, written apart from te_jax, each with bounds on its rounding errors.

An implementation under test rounds to its type, of unit roundoff u (bf16 2^-8, f16 2^-11, f32 2^-24) and absolute
error eta where f16 is subnormal, and sums in f32, of unit roundoff w = 2^-24. Operands count as exact. Per row i:

  logits   sums of d products, then scale, bias, and the base of the exponential: d + 4 roundings of the terms' size.
  probs p  an exponent's error is p's relative error; numerator and sum each bring one, and a sum of t terms, the
           exponential and the division some more: eps_i = 2 max_j |logit error| + (t + 8) w.
  out      sum_j p v: p is rounded to the type before the product, and out after:
           eps + t w + u of p |v|, and u of |out|.
  dp       dout v^T: e w of |dout| |v|; plain JAX also rounds it to the type: u of |dp|.
  delta    sum_j p dp, which flash attention takes as dout . out of the rounded out: u of p |dp| (p or dp rounded),
           u of |dout| |out| (out rounded), and eps + t w of p |dp|. One error for the whole row.
  ds       p (dp - delta), rounded to the type before its products: u of |ds|, eps of |ds|.
  dq, dk   scale ds k, scale ds^T q: the sums' f32 errors and u of the result; dk, dv of a group are a sum over heads,
           each of which may be rounded: u of each.
  dbias    sums of ds over what was broadcast. Of the offset: -p_offset delta, summed.
  lse      top + log(sum): the logits' error, that of the sum, and some roundings of lse: eps + 4 w of |lse|.

WORST adds all of these up, in absolute value and for each component: no implementation of this kind exceeds it, so a
wrong element shows even if all others are right. RMS adds the squares of what rounding to the type brings, as errors
of independent signs do. The mean square of a rounding is (0.42 u)^2: uniform, of numbers between powers of two. So the
norm of the error is about 0.42 of the norm of RMS; the factor NORM = 1.25 is 3 standard deviations for one number, and
for the norm of 4 already 8.
"""

from typing import NamedTuple

import numpy as np

W = 2.0**-24
NORM = 1.25
ROUNDING = {"f32": (2.0**-24, 0.0), "bf16": (2.0**-8, 0.0), "f16": (2.0**-11, 2.0**-25)}  # u, eta
SLACK = 1.05  # products of errors: (1 + u)^n is not 1 + n u


class Bounded(NamedTuple):
    value: np.ndarray
    worst: np.ndarray  # of |error|, per component
    norm: float  # of the Frobenius norm of the error

    def misses(self, got) -> str:
        """What is wrong with `got`; "" if nothing is."""
        got = np.asarray(got, np.float64)
        if got.shape != self.value.shape:
            return f"has shape {got.shape}, not {self.value.shape}"
        if np.any(wild := ~np.isfinite(got)):
            return f"{wild.sum()} of {got.size} are not finite, first at {np.argwhere(wild)[0]}"
        error = np.abs(got - self.value)
        if np.any(leaked := (self.worst == 0) & (got != 0)):
            return f"{leaked.sum()} that see nothing are not zero, first at {np.argwhere(leaked)[0]}"
        if np.any(error > self.worst):
            at = np.unravel_index(np.argmax(error / np.maximum(self.worst, 1e-300)), got.shape)
            return f"at {tuple(map(int, at))} is {got[at]}, want {self.value[at]} +- {self.worst[at]:.3g}"
        if np.linalg.norm(error) > self.norm:
            size = np.linalg.norm(self.value)
            return f"error {np.linalg.norm(error):.3g} of norm {size:.3g}; the bound is {self.norm:.3g}"
        return ""


def attend(q, k, v, dout, *, dtype, seen, scale, bias=None, pre_scale=False, joins=None) -> dict[str, Bounded]:
    """q [b, s, h, d], k [b, t, g, d], v [b, t, g, e], dout [b, s, h, e] -> out, lse [b, h, s] (0 for a query that sees
    nothing), dq, dk, dv, and dbias of bias's shape, doffset [h].

    seen: bool [b, h, s, t], the keys that a query sees. bias: [s, t] or [b, h, s, t], 1 where it broadcasts.
    joins: [h], the logit that joins the sum of exponentials.
    """
    heads = lambda x: np.repeat(np.swapaxes(np.asarray(x, np.float64), 1, 2), q.shape[2] // x.shape[2], 1)
    g, rounding = k.shape[2], ROUNDING[dtype]
    q, k, v, dout = map(heads, (q, k, v, dout))
    full = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), seen.shape)
    probs, p_joins, lse, eps = _softmax(q, k, seen, scale, full, pre_scale, joins)
    got = {"out": _mixed(probs, v, eps, rounding)}
    ds = _Logits.of(probs, v, dout, got["out"].value, eps, seen, rounding)
    got["dq"] = ds.times(k, scale)
    got["dk"] = ds.transposed().times(q, scale, g)
    got["dv"] = _mixed(np.swapaxes(probs, 2, 3), dout, np.swapaxes(eps, 2, 3), rounding, g)
    for name in got:
        got[name] = Bounded(*(np.swapaxes(x, 1, 2) for x in got[name][:2]), got[name].norm)
    got["lse"] = lse
    if bias is not None:
        got["dbias"] = ds.summed(np.shape(bias), scale if pre_scale else 1.0)
    if joins is not None:
        got["doffset"] = ds.joined(p_joins)
    return got


def _softmax(q, k, seen, scale, bias, pre_scale, joins):
    """-> probabilities [b, h, s, t], of what joins [b, h, s, 1] or 0, lse, and p's relative error eps [b, h, s, 1]."""
    dots = q @ np.swapaxes(k, 2, 3)
    sizes = np.matmul(*_brief(np.abs(q), np.swapaxes(np.abs(k), 2, 3)))
    bias = 0.0 if bias is None else np.where(seen, bias, 0.0)  # a hidden key's bias may be -inf
    logits = scale * (dots + bias) if pre_scale else scale * dots + bias
    sizes = abs(scale) * (sizes + np.abs(bias)) if pre_scale else abs(scale) * sizes + np.abs(bias)
    logits = np.where(seen, logits, -np.inf)
    extra = -np.inf if joins is None else np.asarray(joins, np.float64).reshape(-1, 1, 1)
    top = np.maximum(np.max(logits, -1, keepdims=True), extra)
    top = np.where(np.isinf(top), 0.0, top)
    weights, extra = np.exp(logits - top), np.exp(extra - top)
    total = weights.sum(-1, keepdims=True) + extra
    blind, total = total == 0, np.where(total == 0, 1.0, total)
    error = W * ((q.shape[-1] + 4) * np.max(np.where(seen, sizes, 0.0), -1, keepdims=True) + 4 * np.abs(top))
    eps = 2 * error + (k.shape[2] + 8) * W
    lse = np.where(blind, 0.0, top + np.log(total))[..., 0]
    worst = np.where(blind[..., 0], 0.0, eps[..., 0] + 4 * W * np.abs(lse))
    return weights / total, extra / total, Bounded(lse, worst, np.linalg.norm(worst)), eps


def _brief(*arrays):
    """For bounds f32 will do, in half the time."""
    return [np.asarray(x, np.float32) for x in arrays]


def _over_heads(x, g):
    """The sum over the heads of each group, [b, g, ...]; all heads without g."""
    return x if g is None else x.reshape(x.shape[0], g, -1, *x.shape[2:]).sum(2)


def _mixed(p, x, eps, rounding, g=None) -> Bounded:
    """p x, its group's heads summed if g is given."""
    u, eta = rounding
    each = p @ x
    value = _over_heads(each, g)
    p, x, eps, each = _brief(p, x, eps, each)
    size = np.abs(x)
    narrow = p * (eps + p.shape[-1] * W)
    f32 = _over_heads(narrow @ size, g)
    worst = f32 + _over_heads(_rounded(p, u, eta) @ size + u * np.abs(each), g) + u * np.abs(value)
    worst = worst + eta * (worst > 0)
    square = _over_heads(_rounded(p, u, eta) ** 2 @ x**2 + (u * each) ** 2, g) + (u * value + eta) ** 2 + f32**2
    return Bounded(value, SLACK * worst, NORM * np.sqrt(square.sum()))


def _rounded(x, u, eta):
    """The error of rounding x; of what is hidden, and so an exact zero, none."""
    return u * np.abs(x) + eta * (x != 0)


class _Logits(NamedTuple):
    """The gradient of the logits, [b, h, s, t], and its errors."""

    value: np.ndarray
    f32: np.ndarray  # of f32 sums
    own: np.ndarray  # of rounding to the type, independent of other elements
    rows: np.ndarray  # the same of delta, for the whole row: worst, times p
    rows_rms: np.ndarray  # its root mean square, times p
    delta: np.ndarray  # [b, h, s, 1]
    of_delta: tuple[np.ndarray, np.ndarray, np.ndarray]  # its worst and rms, and eps, [b, h, s, 1]
    rounding: tuple[float, float]

    @classmethod
    def of(cls, p, v, dout, out, eps, seen, rounding):
        u, eta = rounding
        t, e = v.shape[2:]
        total = lambda x: x.sum(-1, keepdims=True)
        dp = np.where(seen, dout @ np.swapaxes(v, 2, 3), 0.0)  # junk where nobody looks
        delta = total(p * dp)
        exact = p * (dp - delta)
        p, v, dout, out, eps, dp, value = _brief(p, v, dout, out, eps, dp, exact)
        sizes = np.where(seen, np.abs(dout) @ np.swapaxes(np.abs(v), 2, 3), np.float32(0))
        mean, product = total(p * np.abs(dp)), total(np.abs(dout * out))
        delta_f32 = (eps + t * W) * mean + e * W * product
        delta_worst = u * (mean + product) + eta * total(np.abs(dout)) + delta_f32
        delta_rms = u * np.sqrt(total((p * dp) ** 2) + total((dout * out) ** 2)) + eta * np.sqrt(total(dout**2))
        f32 = p * (e * W * sizes + delta_f32) + eps * np.abs(value)
        own = np.sqrt(_rounded(p * dp, u, eta * p) ** 2 + (u * value + eta * (p > 0)) ** 2)
        return cls(exact, f32, own, p * delta_worst, p * delta_rms, delta, (delta_worst, delta_rms, eps), rounding)

    def transposed(self):
        """[b, h, t, s]: what one delta's error is in is now a column."""
        return self._replace(**{name: np.swapaxes(getattr(self, name), 2, 3) for name in self._fields[:5]})

    def _worst(self):
        return self.f32 + 1.4143 * self.own + self.rows  # a + b <= sqrt(2 (a^2 + b^2))

    def times(self, x, scale, g=None) -> Bounded:
        """scale ds x, its group's heads summed if g is given."""
        u, eta = self.rounding
        each = scale * (self.value @ x)
        value = _over_heads(each, g)
        x, each = _brief(x, each)
        size = np.abs(x)
        f32 = abs(scale) * _over_heads((self.f32 + self.value.shape[-1] * W * np.abs(_brief(self.value)[0])) @ size, g)
        worst = abs(scale) * _over_heads(self._worst() @ size, g) + f32 + _over_heads(u * np.abs(each), g)
        worst = worst + u * np.abs(value)
        worst = worst + eta * (worst > 0)
        # for dq one row's delta errs on all terms alike, for dk each term's errs by itself
        rows = (self.rows_rms @ x) ** 2 if g is None else self.rows_rms**2 @ x**2
        square = scale**2 * _over_heads(self.own**2 @ x**2 + rows, g) + _over_heads((u * each) ** 2, g)
        return Bounded(value, SLACK * worst, NORM * np.sqrt(np.sum(square + (u * value + eta) ** 2 + f32**2)))

    def summed(self, shape, factor) -> Bounded:
        """The gradient of a bias of `shape`, which is multiplied by `factor`."""
        u, eta = self.rounding
        lined = (1,) * (4 - len(shape)) + tuple(shape)
        axes = tuple(i for i, size in enumerate(lined) if size == 1)
        add = lambda x: x.sum(axes, keepdims=True)
        count = self.value.size / np.prod(lined)
        value, f32 = factor * add(self.value), abs(factor) * add(self.f32 + count * W * np.abs(self.value))
        worst = abs(factor) * add(self._worst()) + f32 + u * np.abs(value)
        rows = self.rows_rms.sum(-1, keepdims=True) if 3 in axes else self.rows_rms  # alike along a row
        square = factor**2 * (add(self.own**2) + (rows**2).sum(axes, keepdims=True)) + (u * value + eta) ** 2 + f32**2
        worst = worst + eta * (worst > 0)
        return Bounded(value.reshape(shape), SLACK * worst.reshape(shape), NORM * np.sqrt(square.sum()))

    def joined(self, p) -> Bounded:
        """The gradient of what joins the softmax with probability p [b, h, s, 1]."""
        add = lambda x: x.sum((0, 2, 3))
        worst, rms, eps = self.of_delta
        value, count = add(-p * self.delta), p.shape[0] * p.shape[2]
        f32 = add((eps + count * W) * p * np.abs(self.delta))
        square = add((p * rms) ** 2) + f32**2
        return Bounded(value, SLACK * (add(p * worst) + f32), NORM * np.sqrt(square.sum()))
