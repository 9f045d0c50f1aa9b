"""A router in float64, token by token: written apart from te_jax.ops.router, with sorts instead of top_k."""

import math

import numpy as np


def _softmax(values):
    top = max(values)
    if math.isnan(sum(values)) or math.isinf(top):
        return [math.nan] * len(values)
    powers = [math.exp(v - top) for v in values]
    return [p / math.fsum(powers) for p in powers]


def _sigmoid(value):
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _best(values, count):
    """The indices of the largest values; of equal ones the lower index; a NaN is below all."""
    order = sorted(range(len(values)), key=lambda i: (-values[i] if not math.isnan(values[i]) else math.inf, i))
    return order[:count]


def _sqrt_softplus(value):
    return math.exp(value / 2) if value < -40 else math.sqrt(max(value, 0.0) + math.log1p(math.exp(-abs(value))))


def scores(row, options):
    if options.score_function == "sigmoid":
        return [_sigmoid(v) for v in row]
    if options.score_function == "sqrt_softplus":
        return [_sqrt_softplus(v) for v in row]
    return _softmax(row) if options.use_pre_softmax else list(row)


def choose(row, bias, options):
    """The experts of one token, from its logits as f64."""
    ranked = [s + b for s, b in zip(scores(row, options), bias)]
    groups, size = options.group_topk, len(row) // options.num_groups
    if groups is not None and groups < options.num_groups:
        width = min(max(1, options.topk // groups), size)
        of_group = [ranked[i * size : (i + 1) * size] for i in range(options.num_groups)]
        sums = [sum(sorted(g, reverse=True)[:width]) for g in of_group]
        kept = set(_best(sums, groups))
        return [i for i in _best(ranked, len(ranked)) if i // size in kept][: options.topk]
    return _best(ranked, options.topk)


def normalizes(options):
    """Whether a token's weights are divided by their sum."""
    return options.score_function != "softmax" and options.topk > 1 if options.normalize is None else options.normalize


def weigh(row, experts, options):
    """The weights of one token's experts."""
    if any(math.isnan(v) for v in row):
        return [math.nan] * len(experts)
    each = scores(row, options)
    picked = [each[i] for i in experts]
    if options.score_function == "softmax" and not options.use_pre_softmax:
        picked = _softmax(picked)
    if normalizes(options):
        total = max(math.fsum(picked), 1e-20)
        picked = [p / total for p in picked]
    return [options.scaling_factor * p for p in picked]


def gradient(row, experts, dweights, options):
    """d(sum of weights * dweights) / d(logits) of one token: f64[E], by the chain rule from the weights back."""
    row, grad = np.asarray(row), np.zeros(len(row))
    d = options.scaling_factor * np.asarray(dweights)
    if options.score_function == "softmax" and not options.use_pre_softmax:
        picked = np.array(_softmax(list(row[experts])))
        if normalizes(options):  # of weights that add up to 1
            d = d - d @ picked
        grad[experts] = picked * (d - d @ picked)
        return grad
    each = np.array(scores(row, options))
    picked = each[experts]
    if normalizes(options):
        total = picked.sum()
        d = (d - d @ picked / total) / total if total > 1e-20 else d / 1e-20
    of_scores = np.zeros(len(row))
    of_scores[experts] = d
    if options.score_function == "sigmoid":
        return of_scores * each * (1 - each)
    if options.score_function == "sqrt_softplus":  # sigmoid(x) / (2 score), and of small logits score / 2
        return of_scores * [s / 2 if v < -40 else _sigmoid(v) / (2 * s) for v, s in zip(row, each)]
    return each * (of_scores - of_scores @ each)
