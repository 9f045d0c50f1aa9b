"""The cases of test_attention_matrix.py: a covering design of what `dot_product_attention` takes, and their data.

A `Case` is names only. Every pair of values of any two of its dimensions is in some case, wherever both can be; mask
type, window and segments, which decide who sees whom, are combined in full. `problem` makes the arrays, small for a CPU
or larger for a GPU, and says which keys each query sees, from lists of the tokens of each segment and without te_jax.
"""

import itertools
import random
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from attention_oracle import visible

from te_jax.ops.attention import SequenceDescriptor

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
LENGTHS = {  # s, t on a CPU; on a GPU
    "even": ((8, 8), (192, 192)),
    "odd": ((9, 9), (131, 131)),
    "s_lt_t": ((6, 13), (77, 203)),
    "s_gt_t": ((13, 7), (203, 77)),
    "one_query": ((1, 9), (1, 130)),
    "one_key": ((7, 1), (130, 1)),
    "two": ((2, 2), (2, 2)),
    "long": ((16, 17), (500, 611)),
}
WINDOWS = {  # on a CPU; on a GPU
    "open": (None, None),
    "both": ((2, 1), (31, 17)),
    "left": ((3, -1), (45, -1)),
    "right": ((-1, 1), (-1, 23)),
    "self": ((0, 0), (0, 0)),
    "past": ((2, 0), (29, 0)),
    "wide": ((20, 30), (400, 500)),
    "edge": (None, None),  # hides key 0 from the last query, and the last key from the first: `_window`
}
FILLS = {  # kinds of segments -> cases that share a program and differ in numbers
    "none": ("none",),
    "lengths": ("lengths", "lengths_zero"),
    "packed": ("packed", "packed_gaps", "packed_cross"),
    "ids": ("ids", "ids_mixed"),
}
SHAPES = {  # of mask and bias; None: b, h, s or t
    "none": None,
    "11st": (1, 1, None, None),
    "b1st": (None, 1, None, None),
    "1hst": (1, None, None, None),
    "bhst": (None, None, None, None),
    "b11t": (None, 1, 1, None),
    "1111": (1, 1, 1, 1),
    "st": (None, None),
}


@dataclass(frozen=True)
class Case:
    dtype: str = "bf16"
    heads: tuple[int, int] = (4, 2)  # h, g
    dims: tuple[int, int] = (64, 64)  # d, e
    lengths: str = "odd"
    batch: int = 2
    mask_type: str = "no_mask"
    window: str = "open"
    rows: str = "none"  # the segments of each row
    mask: str = "none"
    bias: str = "none"
    bias_type: str = "post_scale_bias"
    bias_dtype: str = "f32"  # or "own", that of q
    hidden_bias: str = "large"  # what it holds at hidden keys; or "inf", on a CPU
    softmax: str = "vanilla"
    scale: str = "default"
    joined: str = "none"  # what lies in one array: "qkv", "kv", also interleaved
    path: str = "auto"  # or "xla", on a CPU

    def __str__(self):
        always = (self.dtype, f"h{self.heads[0]}g{self.heads[1]}", f"d{self.dims[0]}e{self.dims[1]}", self.lengths)
        told = [f"b{self.batch}", self.mask_type]
        for field in fields(self)[6:]:
            value = getattr(self, field.name)
            if value != field.default:
                told.append(f"{field.name}_{value}")
        return "-".join((*always, *told))


VALUES = {  # of each dimension in the design, likelier ones first and more often
    "mask_type": (
        *("no_mask", "causal", "causal_bottom_right"),
        *("padding", "padding_causal", "padding_causal_bottom_right"),
    ),
    "window": ("open", "both", "left", "right", "self", "past"),
    "rows": tuple(FILLS),
    "dtype": ("bf16", "f16", "f32"),
    "heads": ((4, 2), (4, 4), (3, 3), (4, 1), (6, 3), (12, 4), (8, 2)),
    "dims": ((64, 64), (128, 128), (8, 8), (40, 40), (96, 96), (192, 128), (256, 256), (64, 128), (96, 40)),
    "lengths": ("even", "odd", "s_lt_t", "s_gt_t"),
    "batch": (2, 1, 3),
    "mask": ("none", "none", "none", "none", "none", "none", "11st", "b1st", "1hst", "bhst", "b11t"),
    "bias": ("none", "none", "none", "none", "none", "none", "11st", "b1st", "1hst", "bhst", "b11t"),
    "bias_type": ("post_scale_bias", "pre_scale_bias"),
    "bias_dtype": ("f32", "own"),
    "hidden_bias": ("large", "inf"),
    "softmax": ("vanilla", "vanilla", "vanilla", "vanilla", "off_by_one", "learnable"),
    "scale": ("default", "given"),
    "joined": (*("none",) * 4, "qkv", "kv", "qkv_interleaved", "kv_interleaved"),
    "path": ("auto", "xla"),
}


def legal(part: dict[str, Any]) -> bool:
    """Whether a case may have these values, of some or all dimensions."""
    joined, (d, e) = part.get("joined", "none"), part.get("dims", (1, 1))
    if joined != "none" and d != e:
        return False
    if joined.startswith("qkv"):
        h, g = part.get("heads", (1, 1))
        if h != g or part.get("lengths") in ("s_lt_t", "s_gt_t"):
            return False
    unused = {"bias_type": "post_scale_bias", "bias_dtype": "f32", "hidden_bias": "large"}
    return part.get("bias") != "none" or all(part.get(name, value) == value for name, value in unused.items())


def pairs(part: dict[str, Any]) -> set:
    return set(itertools.combinations(sorted(part.items(), key=lambda item: list(VALUES).index(item[0])), 2))


def all_pairs() -> set:
    ones = [(name, value) for name, values in VALUES.items() for value in dict.fromkeys(values)]
    return {(a, b) for a, b in itertools.combinations(ones, 2) if a[0] != b[0] and legal(dict((a, b)))}


def _drawn(given: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A legal case with the values `given`: legality is a matter of pairs, so one dimension after the other."""
    part = dict(given)
    for name, values in sorted(VALUES.items(), key=lambda item: item[0] != "joined"):
        if name not in given:
            part[name] = draw.choice(values)
            if not legal(part):
                part[name] = draw.choice([value for value in values if legal(part | {name: value})])
    return part


def _programs():
    """Mask types x windows x segments once, and four times without segments; then what pairs are missing.

    Of three programs, two have at most one of bias, mask and softmax type: many in one hide a kernel's faults, and
    kernels do not take them.
    """
    draw, missing = random.Random(0), all_pairs()
    best_of = lambda given: max((_drawn(given, draw) for _ in range(30)), key=lambda part: len(pairs(part) & missing))
    kinds = ("none", "lengths", "packed", "ids", "none", "none", "none")
    rare = {"bias": "none", "mask": "none", "softmax": "vanilla"}
    for rows, mask_type, window in itertools.product(kinds, VALUES["mask_type"], VALUES["window"]):
        alone = draw.choice((*rare, None))
        fixed = {name: value for name, value in rare.items() if name != alone} if draw.random() < 2 / 3 else {}
        best = best_of(dict(rows=rows, mask_type=mask_type, window=window, **fixed))
        missing -= pairs(best)
        yield best
    while missing:
        best = best_of(dict(min(missing, key=str)))
        missing -= pairs(best)
        yield best


_BASE = Case()
CORNERS = [
    *(replace(_BASE, lengths=lengths, mask_type=mask_type)
      for lengths in ("one_query", "one_key", "two")
      for mask_type in ("no_mask", "causal", "causal_bottom_right")),
    *(replace(_BASE, rows=rows, mask_type=mask_type, lengths=lengths, batch=3)
      for rows in ("lengths_same", "lengths_empty", "packed_swapped", "packed_starts")
      for mask_type, lengths in (("padding", "s_lt_t"), ("padding_causal_bottom_right", "s_gt_t"))),
    *(replace(_BASE, window="wide", mask_type=mask_type, lengths="s_lt_t") for mask_type in VALUES["mask_type"][:3]),
    *(replace(_BASE, window="edge", mask_type=mask_type, lengths=lengths)
      for mask_type in ("no_mask", "causal", "causal_bottom_right", "padding_causal_bottom_right")
      for lengths in ("s_lt_t", "s_gt_t")),
    *(replace(_BASE, lengths="long", mask_type=mask_type, rows=rows, window=window)
      for mask_type, window in (("no_mask", "both"), ("causal", "past"), ("causal_bottom_right", "left"))
      for rows in ("none", "lengths", "packed_gaps")),
    *(replace(_BASE, scale=scale, mask_type="causal") for scale in ("negative", "zero")),
    *(replace(_BASE, bias=bias, bias_type=bias_type, softmax=softmax)
      for bias in ("st", "1111")
      for bias_type, softmax in (("post_scale_bias", "vanilla"), ("pre_scale_bias", "learnable"))),
    *(replace(_BASE, mask=mask, softmax=softmax)
      for mask in ("st", "1111")  # of one element: nobody sees anything
      for softmax in ("vanilla", "learnable")),
    *(replace(_BASE, batch=5, heads=(6, 6), dims=(32, 32), joined=joined, rows=rows, mask_type=mask_type, window="past")
      for rows, joined in (("packed_cross", "qkv"), ("ids", "qkv"), ("packed_cross", "qkv_interleaved"))
      for mask_type in ("causal", "padding_causal_bottom_right")),
    *(replace(_BASE, lengths="s_gt_t", joined=joined, rows=rows, mask_type="padding_causal_bottom_right")
      for joined in ("kv", "kv_interleaved") for rows in ("none", "lengths_zero", "packed_gaps")),
]  # fmt: skip


def cases() -> list[Case]:
    drawn = [Case(**part | {"rows": rows}) for part in _programs() for rows in FILLS[part["rows"]]]
    return list(dict.fromkeys((*drawn, *CORNERS)))


# ---- who sees whom -------------------------------------------------------------------------------


def segments(case: Case, s: int, t: int, rng) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of each row, the tokens of each segment, of the queries and of the keys, in the order of their positions."""
    if case.rows == "none":
        return [[(np.arange(s), np.arange(t))]] * case.batch
    return [_row(case.rows, n, s, t, rng) for n in range(case.batch)]


def _row(rows: str, n: int, s: int, t: int, rng):
    if rows.startswith("lengths"):
        return [tuple(np.arange(length) for length in _lengths(rows, n, s, t, rng))]
    if rows == "ids_mixed":  # any order of tokens, and padding between them
        sides = [(rng.permutation(size), rng.integers(0, 4, size)) for size in (s, t)]
        return [tuple(order[ids == number] for order, ids in sides) for number in (1, 2, 3)]
    if rows in ("packed_gaps", "ids"):  # of length zero, too
        count = 3 - n % 2
        cuts = [np.sort(rng.integers(0, size + 1, 2 * count)).reshape(-1, 2) for size in (s, t)]
    else:
        ends = [np.sort(rng.choice(np.arange(1, size), 3, replace=False)) for size in (s, t)]
        ends[1] = ends[0] if rows == "packed" and s == t else ends[1]
        cuts = [np.stack([np.concatenate([[0], end[:-1]]), end], 1) for end in ends]
        cuts[1] = cuts[1][::-1] if rows == "packed_swapped" else cuts[1]
    return [tuple(np.arange(start, end) for start, end in pair) for pair in zip(*cuts)]


def _lengths(rows, n, s, t, rng):
    if rows == "lengths_empty" or (rows == "lengths_zero" and n == 0):
        return (0, 0) if rows == "lengths_empty" else (int(rng.integers(1, s + 1)), 0)
    if rows == "lengths_zero" and n == 1:
        return 0, int(rng.integers(1, t + 1))
    if rows == "lengths_same":
        return (int(rng.integers(1, min(s, t) + 1)),) * 2
    return (s, int(rng.integers(1, t + 1))) if n == 0 else (int(rng.integers(1, s + 1)), int(rng.integers(1, t + 1)))


def descriptor(case: Case, rows, s: int, t: int) -> SequenceDescriptor | None:
    kind, _, fill = case.rows.partition("_")
    if kind == "none":
        return None
    sides = [[[pair[side] for pair in row] for row in rows] for side in (0, 1)]
    if kind == "lengths":
        lens = [np.array([len(row[0]) for row in side], np.int32) for side in sides]
        return SequenceDescriptor.from_seqlens(lens[0] if fill == "same" else tuple(lens))
    if kind == "packed":
        return SequenceDescriptor.from_seqlens_and_offsets(*zip(*(_offsets(fill, side) for side in sides)))
    ids, pos = zip(*(_ids(side, size) for side, size in zip(sides, (s, t))))
    return SequenceDescriptor.from_segment_ids_and_pos(ids, pos if fill == "mixed" else None)


def _offsets(fill: str, rows) -> tuple[np.ndarray, np.ndarray]:
    """i32[b, 4] lengths and i32[b, 5] offsets of up to 3 segments: what is left over is unused, in either spelling."""
    lens = np.full((len(rows), 4), 0 if fill == "cross" else -1, np.int32)
    offsets = np.full((len(rows), 4 if fill == "starts" else 5), -1, np.int32)
    for n, row in enumerate(rows):
        for j, tokens in enumerate(row):
            lens[n, j] = len(tokens)
            offsets[n, j] = tokens[0] if len(tokens) else 0
    return lens, offsets


def _ids(rows, size: int) -> tuple[np.ndarray, np.ndarray]:
    """i32[b, size] numbers of segments, in no order, and positions in them."""
    ids, pos = (np.zeros((len(rows), size), np.int32) for _ in range(2))
    for n, row in enumerate(rows):
        for number, tokens in zip((3, 1, 7), row):
            ids[n, tokens], pos[n, tokens] = number, np.arange(len(tokens))
    return ids, pos


# ---- the numbers ---------------------------------------------------------------------------------


class Problem(NamedTuple):
    operands: tuple[np.ndarray, ...]  # q, k, v, dout
    differentiated: dict[str, np.ndarray]  # bias, softmax_offset
    arrays: dict[str, Any]  # mask, sequence_descriptor
    options: dict[str, Any]  # static
    oracle: dict[str, Any]  # the keywords of attention_float64.attend


def problem(case: Case, gpu: bool = False, numbers: bool = True) -> Problem:
    """Without `numbers` q, k, v and dout are zeros, made in no time."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    dtype = "bf16" if gpu and case.dtype == "f32" else case.dtype
    s, t = LENGTHS[case.lengths][gpu]
    window = _window(case, s, t) if case.window == "edge" else WINDOWS[case.window][gpu]
    rows = segments(case, s, t, rng)
    seen = np.zeros((case.batch, case.heads[0], s, t), bool)
    corner = dict(causal="causal" in case.mask_type, bottom_right=case.mask_type.endswith("bottom_right"))
    for n, row in enumerate(rows):
        for q_tokens, k_tokens in row:
            block = visible(len(q_tokens), len(k_tokens), window=window or (-1, -1), **corner)
            seen[n][:, q_tokens[:, None], k_tokens] = block
    arrays = {"sequence_descriptor": descriptor(case, rows, s, t)}
    if case.mask != "none":
        hidden = _mask(_shape(case.mask, seen), rng)
        seen &= ~hidden
        arrays["mask"] = hidden.astype(np.int32) if case.mask == "st" else hidden
    operands = _operands(case, seen, DTYPES[dtype], rng if numbers else None)
    options = dict(attn_mask_type=case.mask_type, window_size=window, softmax_type=case.softmax)
    oracle = dict(dtype=dtype, seen=seen, scale=float(case.dims[0]) ** -0.5)
    if case.scale != "default":
        options["scale"] = oracle["scale"] = {"given": 1.5, "negative": -1.0, "zero": 0.0}[case.scale] * oracle["scale"]
    if case.bias != "none":
        options["attn_bias_type"], oracle["pre_scale"] = case.bias_type, case.bias_type == "pre_scale_bias"
        oracle["bias"] = _bias(_shape(case.bias, seen), seen, case.hidden_bias == "inf" and not gpu, rng)
    if case.softmax != "vanilla":
        sixteenths = rng.integers(-32, 48, case.heads[0])
        oracle["joins"] = sixteenths / 16 if case.softmax == "learnable" else 0.0 * sixteenths
    return Problem(operands, _differentiated(case, oracle, DTYPES[dtype]), arrays, options, oracle)


def _window(case: Case, s: int, t: int) -> tuple[int, int]:
    return (t - 2, s - 2) if case.mask_type.endswith("bottom_right") else (s - 2, t - 2)


def _differentiated(case: Case, oracle, dtype) -> dict[str, np.ndarray]:
    found = {}
    if case.bias != "none":
        found["bias"] = oracle["bias"].astype(np.float32 if case.bias_dtype == "f32" else dtype)
    if case.softmax == "learnable":
        found["softmax_offset"] = oracle["joins"].astype(np.float32)
    return found


def _shape(name: str, seen: np.ndarray) -> tuple[int, ...]:
    pattern = SHAPES[name]
    return tuple(size or full for size, full in zip(pattern, seen.shape[-len(pattern) :]))


def _mask(shape, rng) -> np.ndarray:
    """Three keys of ten hidden, and whole queries and keys."""
    hidden = rng.random(shape) < (0.3 if np.prod(shape) > 1 else 2)
    for axis in (-1, -2):
        if shape[axis] > 2:
            np.moveaxis(hidden, axis, 0)[:, ..., rng.integers(hidden.shape[-3 - axis])] = True
    return hidden


def _operands(case: Case, seen: np.ndarray, dtype, rng):
    """Standard normal numbers; a thousand times as large in queries that see no key, and in keys that no query sees."""
    (h, g), (d, e), (b, _, s, t) = case.heads, case.dims, seen.shape
    sizes = (b, s, h, d), (b, t, g, d), (b, t, g, e), (b, s, h, e)
    if rng is None:
        return [np.zeros(size, dtype) for size in sizes]
    q, k, v, dout = (rng.standard_normal(size, np.float32) for size in sizes)
    blind = ~np.swapaxes(seen.any(3), 1, 2)
    unseen = ~np.swapaxes(seen.any(2).reshape(b, g, h // g, t).any(2), 1, 2)
    for x, where in ((q, blind), (k, unseen), (v, unseen), (dout, blind)):
        x[where] *= 1000
    return [x.astype(dtype) for x in (q, k, v, dout)]


def _bias(shape, seen, infinite, rng) -> np.ndarray:
    """Sixteenths, which every type holds; large or -inf where it is only for hidden keys."""
    bias = rng.integers(-32, 33, shape) / 16
    lined = (1,) * (4 - len(shape)) + tuple(shape)
    axes = tuple(i for i, size in enumerate(lined) if size == 1)
    bias[~seen.any(axes, keepdims=True).reshape(shape)] = -np.inf if infinite else 1000
    return bias
