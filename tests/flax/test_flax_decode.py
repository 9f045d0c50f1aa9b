"""decode=True: what the KV cache holds, and that calls with it give what one call on whole sequences gives."""

import functools
import warnings

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.ops.attention import SequenceDescriptor

KEY = jax.random.key(0)
H, N, D = 16, 4, 4  # width, heads, width of a head
B, S = 3, 12  # rows, tokens in all
LENGTHS = np.array([5, 1, 7])  # of the prompts
# f32 sums of at most 24 terms in another order; the values behind a norm are of order 1, behind three sums of order 10.
CLOSE = dict(rtol=1e-5, atol=2e-5)
RECIPE = recipe.DelayedScaling(amax_history_len=4)


def data(*shape, dtype=jnp.float32, seed=1):
    return on_device(np.random.default_rng(seed).normal(size=shape), dtype)


def layer(**fields):
    quiet = dict(hidden_dropout=0.0, attention_dropout=0.0)
    return te_flax.TransformerLayer(
        **{"hidden_size": H, "mlp_hidden_size": 24, "num_attention_heads": N, **quiet, **fields}
    )


def mha(**fields):
    return te_flax.MultiHeadAttention(**{"head_dim": D, "num_attention_heads": N, **fields})


def drawn(module, *args, **kwargs):
    """`init`'s variables without its work: parameters from numpy, FP8 scales of 1, an empty cache if decode=True."""
    shapes = jax.eval_shape(lambda: module.init(KEY, *args, **kwargs))
    fill = lambda path, leaf: jnp.full(leaf.shape, path[-1].key.endswith("_scale"), leaf.dtype)
    others = jax.tree_util.tree_map_with_path(fill, {**shapes, "params": {}})
    return {**others, "params": ref.unboxed(ref.filled(shapes["params"], seed=2))}


def output(result):
    return result[0] if isinstance(result, tuple) else result


class Caller:
    """`module` on the tokens of x [b, S, H] in order, some at a time, each row from where it is."""

    def __init__(self, module, variables, x, cache=None, slots=S, **kwargs):
        self.module, self.variables, self.x, self.kwargs = module, variables, x, kwargs
        self.cache, self.slots = cache, slots
        self.at = np.zeros(len(x), int)
        self.flipped = module.transpose_batch_sequence
        self.jitted = jax.jit(self.apply, donate_argnums=0)

    def apply(self, cache, x, mask):
        name = "attention_mask" if isinstance(self.module, te_flax.TransformerLayer) else "mask"
        options = {"decode": True, "deterministic": True, **self.kwargs}
        if mask is not None:
            options[name] = mask
        if not cache:
            options["max_decode_length"] = self.slots
        y, cache = self.module.apply({**self.variables, **cache}, x, mutable=["cache"], **options)
        return output(y), cache

    def rows(self, array, s):
        """array[r, at[r] : at[r] + s], junk behind the end."""
        index = self.at[:, None] + np.arange(s)
        array = np.concatenate([array, np.full_like(array[:, :1], 9)], 1)
        return array[np.arange(len(array))[:, None], np.minimum(index, array.shape[1] - 1)]

    def __call__(self, s, lengths=None, mask=None):
        """The next s tokens of each row, or of row r lengths[r] and then padding; mask [b, S, S] by positions."""
        x = self.rows(np.asarray(self.x), s)
        if lengths is not None:
            x = np.where(np.arange(s)[:, None] < lengths[:, None, None], x, 9)
            mask = SequenceDescriptor.from_seqlens(jnp.asarray(lengths))
        elif mask is not None:
            mask = jnp.asarray(self.rows(mask, s)[:, None])
        x = jnp.asarray(np.swapaxes(x, 0, 1) if self.flipped else x)
        y, self.cache = self.jitted(self.cache or {}, x, mask)
        self.at = self.at + (s if lengths is None else lengths)
        return np.swapaxes(np.asarray(y), 0, 1) if self.flipped else np.asarray(y)


def check_ragged(caller, want, chunks, **bound):
    """Prompts of three lengths, then calls of `chunks` tokens: outputs are the whole sequence's at their positions."""
    pieces = [(max(LENGTHS), LENGTHS)] + [(s, None) for s in chunks]
    for s, lengths in pieces:
        first = caller.at
        got = caller(s, lengths)
        for row, count in enumerate(np.full(B, s) if lengths is None else lengths):
            due = want[row, first[row] : first[row] + count]
            np.testing.assert_allclose(got[row, :count], due, **bound, err_msg=f"row {row} from {first[row]}")


def fields_id(fields):
    return "-".join(f"{value}" for value in fields.values()) or "default"


LLAMA = dict(num_gqa_groups=2, layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), enable_rotary_pos_emb=True)
PARALLEL = dict(parallel_attention_mlp=True, parallel_shared_layernorm=True)
LAYERS = [  # the fields, and what makes the cache
    ({}, "init"),
    (dict(enable_rotary_pos_emb=True), "call"),
    (LLAMA | dict(window_size=(3, 0)), "init"),
    (dict(num_gqa_groups=1, fuse_qkv_params=False, enable_rotary_pos_emb=True, window_size=(2, -1)), "call"),
    (dict(fuse_qkv_params=False, use_bias=True, softmax_type="learnable"), "call"),
    (dict(enable_relative_embedding=True, self_attn_mask_type="padding_causal"), "init"),
    (dict(enable_relative_embedding=True, layer_type="decoder", transpose_batch_sequence=True), "call"),
    (dict(num_gqa_groups=1, enable_rotary_pos_emb=True, **PARALLEL), "call"),
    (
        dict(
            enable_rotary_pos_emb=True, transpose_batch_sequence=True, self_attn_mask_type="causal_bottom_right",
            rotary_pos_emb_group_method="alternate", output_layernorm=True,
        ),
        "init",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "made"), LAYERS, ids=str)
def test_layer(fields, made):
    module, x = layer(**fields), data(B, S, H)
    swap = (lambda a: jnp.swapaxes(a, 0, 1)) if module.transpose_batch_sequence else lambda a: a
    encoded = {"encoded": swap(data(B, 5, H, seed=2))} if "layer_type" in fields else {}
    variables = drawn(module, swap(x), **encoded, decode=True, deterministic=True)
    cache = {"cache": variables.pop("cache")}
    want = swap(jax.jit(lambda v, x: module.apply(v, x, **encoded, deterministic=True))(variables, swap(x)))
    caller = Caller(module, variables, x, cache if made == "init" else None, **encoded)
    check_ragged(caller, np.asarray(want), (2, 1, 1, 1) if made == "init" else (1, 1), **CLOSE)


@pytest.mark.parametrize("made", ["init", "call"])
def test_user_mask_joins_the_others(made):
    """With a mask over all positions, whose columns are the slots; the prompt is 5 tokens in all rows."""
    module, x = mha(enable_rotary_pos_emb=True, window_size=(4, 0)), data(B, S, H)
    hidden = np.random.default_rng(3).random((B, S, S)) < 0.4
    variables = drawn(module, x, decode=True)
    cache = {"cache": variables.pop("cache")}
    want = np.asarray(jax.jit(module.apply)(variables, x, mask=jnp.asarray(hidden[:, None]))[0])
    caller = Caller(module, variables, x, cache if made == "init" else None)
    for s in (5, 5, 1, 1) if made == "init" else (5, 5):
        at = caller.at[0]
        np.testing.assert_allclose(caller(s, mask=hidden), want[:, at : at + s], **CLOSE)


@pytest.mark.parametrize(("mask_type", "window"), [("no_mask", None), ("padding", (3, 1))])
def test_types_without_causality_see_the_row_so_far(mask_type, window):
    module = mha(attn_mask_type=mask_type, window_size=window, num_gqa_groups=2, enable_rotary_pos_emb=True)
    x = data(B, S, H)
    variables = drawn(module, x)
    pieces = [(7, LENGTHS), (2, None), (3, np.array([3, 0, 1])), (1, None)]
    counts = np.array([np.full(B, s) if lengths is None else lengths for s, lengths in pieces])
    ends = np.cumsum(counts, 0)
    calls = [np.searchsorted(ends[:, row], np.arange(S), "right") for row in range(B)]  # of each token
    seen = np.array([np.append(ends[:, row], 0)[call] for row, call in enumerate(calls)])
    hidden = np.arange(S) >= seen[..., None]
    want = np.asarray(jax.jit(module.apply)(variables, x, mask=jnp.asarray(hidden[:, None]))[0])
    caller = Caller(module, variables, x)
    for (s, lengths), count in zip(pieces, counts):
        first, got = caller.at, caller(s, lengths)
        for row in range(B):
            np.testing.assert_allclose(got[row, : count[row]], want[row, first[row] :][: count[row]], **CLOSE)
            np.testing.assert_array_equal(got[row, count[row] :], 0)  # as without a cache, padding sees nothing


def test_given_positions_are_ropes():
    module, x = mha(enable_rotary_pos_emb=True), data(B, S, H)

    @jax.jit
    def run(variables, x):
        want = module.apply(variables, x, positions=3 * jnp.arange(S))[0]
        call = lambda v, s, at, **options: module.apply(
            v, x[:, s], decode=True, positions=3 * at, mutable=["cache"], **options
        )
        _, cache = call(variables, slice(0, 7), jnp.arange(7), max_decode_length=S)
        return call(variables | cache, slice(7, S), jnp.arange(7, S))[0][0], want[:, 7:]

    got, want = run(drawn(module, x), x)
    np.testing.assert_allclose(got, want, **CLOSE)


# -- the variables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fields", [{}, dict(num_gqa_groups=2), dict(fuse_qkv_params=False)], ids=fields_id)
def test_leaves(transposed, fields):
    g = fields.get("num_gqa_groups", N)
    module, x = layer(transpose_batch_sequence=transposed, **fields), data(B, S, H, dtype=jnp.bfloat16)
    shape = (S, B, g, D) if transposed else (B, S, g, D)
    x = jnp.swapaxes(x, 0, 1) if transposed else x
    due = {
        "cached_key": (shape, jnp.bfloat16),
        "cached_value": (shape, jnp.bfloat16),
        "cache_index": ((), jnp.int32),
        "cache_padding": ((B,), jnp.int32),
    }
    variables = jax.eval_shape(lambda x: module.init(KEY, x, decode=True, deterministic=True), x)
    assert set(variables) == {"params", "cache"} and set(variables["cache"]) == {"attention"}
    assert {k: (v.shape, v.dtype) for k, v in variables["cache"]["attention"].items()} == due
    assert "cache" not in jax.eval_shape(lambda x: module.init(KEY, x, deterministic=True), x)
    # The type of a call's cache is that of the next one's: it can be a carry.
    call = lambda v, x, **options: module.apply(v, x, decode=True, deterministic=True, mutable=["cache"], **options)[1]
    made = jax.eval_shape(lambda v: call({"params": v["params"]}, x, max_decode_length=S), variables)["cache"]
    next_one = jax.eval_shape(lambda v: call(v, x[:1] if transposed else x[:, :1]), variables)["cache"]
    assert made == next_one == jax.eval_shape(lambda v: v["cache"], variables)


def test_init_leaves_the_cache_empty():
    cache = jax.jit(lambda x: mha().init(KEY, x, decode=True)["cache"])(data(B, S, H))
    assert len(cache) == 4 and not any(leaf.any() for leaf in cache.values())


def prompted(fields=(), slots=9):
    """A caller whose rows have LENGTHS of `slots` tokens."""
    module, x = mha(enable_rotary_pos_emb=True, **dict(fields)), data(B, S, H)
    variables = drawn(module, x)
    caller = Caller(module, variables, x, slots=slots)
    caller(7, LENGTHS)
    return caller, np.asarray(jax.jit(module.apply)(variables, x)[0])


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_slots_that_are_not_written_are_never_read(mask_type):
    caller, _ = prompted(dict(attn_mask_type=mask_type), slots=S)
    cache, other = caller.cache["cache"], dict(caller.cache["cache"])
    empty = np.arange(S) >= LENGTHS[:, None]
    for name in ("cached_key", "cached_value"):
        assert not np.asarray(cache[name])[empty].any(), "padding takes no slots"
        other[name] = jnp.where(empty[..., None, None], jnp.nan, cache[name])
    x = caller.x[:, :2]
    apply = jax.jit(caller.apply)
    want, got = (apply({"cache": cache}, x, None)[0] for cache in (cache, other))
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fields", [{}, dict(transpose_batch_sequence=True)], ids=fields_id)
def test_past_the_last_slot_is_nan(fields):
    module, x = mha(enable_rotary_pos_emb=True, **fields), data(B, S, H)
    swap = (lambda a: jnp.swapaxes(a, 0, 1)) if module.transpose_batch_sequence else lambda a: a
    variables = drawn(module, swap(x))
    want = np.asarray(jax.jit(lambda v, x: swap(module.apply(v, swap(x))[0]))(variables, x))
    caller = Caller(module, variables, x, slots=9)
    caller(7, LENGTHS)
    for s in (3, 1, 1):
        first, got = caller.at, caller(s)
        lost = first[:, None] + np.arange(s) >= 9
        assert np.isnan(got[lost]).all()
        due = np.stack([want[row, first[row] : first[row] + s] for row in range(B)])
        np.testing.assert_allclose(got[~lost], due[~lost], **CLOSE)
    assert lost.tolist() == [[True], [False], [True]]
    np.testing.assert_array_equal(caller.cache["cache"]["cache_padding"], 7 - LENGTHS)
    assert caller.cache["cache"]["cache_index"] == 12


def test_taking_tokens_back():
    caller, want = prompted(slots=S)
    caller(3)
    taken_back = caller.cache["cache"] | {"cache_index": caller.cache["cache"]["cache_index"] - 2}
    caller.cache, caller.at = {"cache": taken_back}, caller.at - 2
    got = caller(1)
    np.testing.assert_allclose(got[:, 0], want[np.arange(B), caller.at - 1], **CLOSE)
    caller.cache["cache"]["cache_index"] -= 3  # row 1 had one token before its three
    caller.cache["cache"]["cache_padding"] += jnp.asarray([0, 1, 0])
    got = caller(1)
    assert np.isnan(got[1]).all() and np.isfinite(got[::2]).all(), "a position below 0 is not another row's slot"


# -- in a model ----------------------------------------------------------------------------------------------

VOCAB, LAYER_COUNT, TOKENS = 61, 2, 64
PROMPTS = np.array([9, 2, 5])
GPT = dict(use_bias=True, self_attn_mask_type="causal")


class Model(nn.Module):
    """Scanned layers between an embedding and its transpose; learned positions where there is no RoPE."""

    fields: dict

    @nn.compact
    def __call__(self, tokens, positions=None, lengths=None, decode=False, max_decode_length=None):
        embedding = self.param("embedding", nn.initializers.normal(1.0), (VOCAB, H))
        x = 3 * embedding[tokens]
        if "enable_rotary_pos_emb" not in self.fields:
            table = self.param("positions", nn.initializers.normal(1.0), (128, H)) * 3
            x = x + table[jnp.arange(tokens.shape[1]) if positions is None else positions]
        mask = None if lengths is None else SequenceDescriptor.from_seqlens(lengths)

        def body(module, x, mask):
            options = dict(decode=decode, max_decode_length=max_decode_length, deterministic=True)
            return module(x, attention_mask=mask, **options), None

        scan = nn.scan(
            body,
            variable_axes={"params": 0, "fp8_metas": 0, "cache": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYER_COUNT,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = scan(layer(**self.fields, name="layer"), x, mask)
        head = self.param("head", nn.initializers.normal(1.0), (H, VOCAB))
        return te_flax.LayerNorm(layernorm_type="rmsnorm", name="norm")(x) @ head


def last(logits, at):
    """logits [b, s, v] at one position of each row."""
    return jnp.take_along_axis(logits, at[:, None, None], 1)[:, 0]


def cached_greedy(model, variables, prompts, lengths):
    """tokens [b, TOKENS] and their logits [b, TOKENS, v]: a ragged prefill, then a scan over steps of one token."""
    slots = int(prompts.shape[1]) + TOKENS

    @jax.jit
    def prefill(variables):
        options = dict(lengths=lengths, decode=True, max_decode_length=slots, mutable=["cache"])
        logits, cache = model.apply(variables, prompts, **options)
        return last(logits, lengths - 1), cache

    def step(carry, i):
        cache, logits = carry
        token = jnp.argmax(logits, -1)
        options = dict(positions=(lengths + i)[:, None], decode=True, mutable=["cache"])
        new, cache = model.apply(variables | cache, token[:, None], **options)
        return (cache, new[:, 0]), (token, logits)

    logits, cache = prefill(variables)
    assert cache["cache"]["layer"]["attention"]["cached_key"].shape[:3] == (LAYER_COUNT, B, slots)
    generate = jax.jit(lambda cache, logits: jax.lax.scan(step, (cache, logits), jnp.arange(TOKENS)), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as: some donated buffers were not usable
        (after, _), (tokens, logits) = generate(cache, logits)
    assert cache["cache"]["layer"]["attention"]["cached_key"].is_deleted(), "the cache was donated"
    assert (after["cache"]["layer"]["attention"]["cache_index"] == slots).all()
    return np.asarray(tokens.T), np.asarray(jnp.swapaxes(logits, 0, 1))


def uncached_greedy(model, variables, prompts, lengths):
    """tokens [b, TOKENS]: the model reads the whole text for each of them."""

    def step(text, i):
        token = jnp.argmax(last(model.apply(variables, text), lengths + i - 1), -1)
        return text.at[jnp.arange(B), lengths + i].set(token), token

    text = jnp.pad(prompts, ((0, 0), (0, TOKENS)))
    return np.asarray(jax.jit(lambda text: jax.lax.scan(step, text, jnp.arange(TOKENS))[1])(text).T)


@pytest.mark.parametrize(("fields", "fp8"), [(GPT, False), (LLAMA, False), (LLAMA, True)], ids=["gpt", "llama", "fp8"])
def test_generation(fields, fp8):
    model, lengths = Model(fields), jnp.asarray(PROMPTS)
    prompts = jnp.asarray(np.random.default_rng(4).integers(1, VOCAB, (B, max(PROMPTS))))
    prompts = jnp.where(jnp.arange(prompts.shape[1]) < lengths[:, None], prompts, 0)
    with te.autocast(fp8, RECIPE):
        variables = drawn(model, prompts)
        tokens, logits = cached_greedy(model, variables, prompts, lengths)
        assert min(len(np.unique(row)) for row in tokens) > 6, "a dull text"
        text = np.pad(prompts, ((0, 0), (0, TOKENS)))
        where = np.arange(B)[:, None], PROMPTS[:, None] + np.arange(TOKENS)
        text[where] = tokens
        whole = np.asarray(jax.jit(model.apply)(variables, text))[where[0], where[1] - 1]
        if not fp8:
            np.testing.assert_array_equal(tokens, uncached_greedy(model, variables, prompts, lengths))
    # FP8: a sum of another order may cross the edge between two FP8 numbers, 2**-4 apart, here and there.
    bound = 2e-2 if fp8 else 1e-5
    assert np.abs(logits - whole).max() < bound * np.abs(whole).max()


# -- sharding ------------------------------------------------------------------------------------------------


def ragged_call_then_steps(params, x, lengths):
    """Outputs of 4 tokens with padding and of 3 single ones, side by side."""
    y, cache = decoded(params, {}, x[:, :4], mask=SequenceDescriptor.from_seqlens(lengths), max_decode_length=7)
    return jnp.concatenate([y, scanned(params, cache, x[:, 4:])], 1)


def steps_from_init(params, x, lengths):
    """Outputs of single tokens, scanned from the empty cache."""
    return scanned(params, {"cache": ROWS.init(KEY, x, decode=True)["cache"]}, x)


def call_then_steps_from_init(params, x, lengths):
    """The same, but the first token has a call of its own, which may place the cache anew."""
    y, cache = decoded(params, {"cache": ROWS.init(KEY, x, decode=True)["cache"]}, x[:, :1])
    return jnp.concatenate([y, scanned(params, cache, x[:, 1:])], 1)


ROWS = mha(enable_rotary_pos_emb=True, num_gqa_groups=2)


def decoded(params, cache, x, **options):
    y, cache = ROWS.apply({"params": params, **cache}, x, decode=True, mutable=["cache"], **options)
    return y[0], cache


def scanned(params, cache, x):
    step = lambda cache, token: decoded(params, cache, token)[::-1]
    return jnp.moveaxis(jax.lax.scan(step, cache, jnp.moveaxis(x[:, :, None], 1, 0))[1][:, :, 0], 0, 1)


@functools.cache
def rows_case(run):
    """(params, x, lengths), and what one device makes of them."""
    x, lengths = data(4, 7, H), jnp.asarray([3, 4, 1, 2])
    args = drawn(ROWS, x)["params"], x, lengths
    return args, jax.jit(run)(*args)


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("explicit", steps_from_init),
        ("explicit heads", ragged_call_then_steps),
        ("explicit heads", call_then_steps_from_init),
        ("auto", ragged_call_then_steps),
        ("shard_map", steps_from_init),
        ("shard_map", ragged_call_then_steps),
    ],
)
def test_rows_over_a_mesh(kind, run):
    """The cache lies as the keys do, from the start: else the carry of the scan would change its type."""
    (params, x, lengths), want = rows_case(run)
    axis = AxisType.Explicit if kind.startswith("explicit") else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(axis,) * 2)
    rows = PartitionSpec("data")
    if kind == "shard_map":
        run = jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=rows, check_vma=True)
    with jax.set_mesh(mesh):
        if kind == "explicit heads":
            specs = {"out": PartitionSpec("heads"), "query": PartitionSpec(None, "heads")}
            specs["kv"] = PartitionSpec(None, None, "heads")
            for name, spec in specs.items():
                kernel = jax.device_put(params[name]["kernel"], NamedSharding(mesh, spec))
                params = params | {name: params[name] | {"kernel": kernel}}
        placed = [jax.device_put(array, NamedSharding(mesh, rows)) for array in (x, lengths)]
        got = jax.jit(run)(params, *placed)
    np.testing.assert_allclose(got, want, **CLOSE)


# -- errors --------------------------------------------------------------------------------------------------


def test_errors():
    module, x = mha(), data(B, S, H)
    params = drawn(module, x)

    def call(cache, x, **options):  # traced by itself
        options = {"decode": True, "mutable": ["cache"], **options}
        return jax.eval_shape(lambda cache, x: module.apply({**params, **cache}, x, **options), cache, x)

    _, held = call({}, x[:, :2], max_decode_length=5)
    lacks = lambda name: {"cache": {each: value for each, value in held["cache"].items() if each != name}}
    lengths, ids = jnp.asarray([1, 2]), jnp.ones((B, 2), jnp.int32)
    for cache, inputs, options, error, text in (
        ({}, x, {}, ValueError, "finds no 'cache'; pass max_decode_length"),
        ({}, x, dict(max_decode_length=5), ValueError, "12 tokens, but the cache has 5 slots"),
        ({}, x, dict(max_decode_length=0), ValueError, "max_decode_length is 0"),
        ({}, x, dict(max_decode_length=5.0), ValueError, "max_decode_length is 5.0"),
        (held, x, {}, ValueError, "12 tokens, but the cache has 5 slots"),
        (held, x[:, :2], dict(max_decode_length=6), ValueError, "max_decode_length is 6, but the cache has 5"),
        (held, x[:, :2], dict(mutable=False), ValueError, r"not mutable here; .*mutable=\['cache'\]"),
        (lacks("cached_value"), x[:, :2], {}, ValueError, "has cached_key, cache_index, but not cached_value; pass"),
        (lacks("cached_key"), x[:, :2], dict(max_decode_length=5), ValueError, "but not cached_key"),
        (lacks("cache_index"), x[:, :2], {}, ValueError, "but not cache_index"),
        (held, x[:2, :2], {}, ValueError, r"cache_padding has shape \(3,\), this call needs \(2,\)"),
        (held, x[:, :2].astype(jnp.bfloat16), {}, TypeError, "cached_key is float32, the inputs need bfloat16"),
        (held, x[:, :2], dict(mask=jnp.ones((B, 1, 2, 2), bool)), ValueError, r"mask has shape .*the 5 slots"),
        (held, x[:, :2], dict(bias=jnp.ones((1, N, 2, 2))), ValueError, r"bias has shape .*the 5 slots"),
        (held, x[:, :2], dict(mask=SequenceDescriptor.from_seqlens(lengths)), ValueError, r"seqlens of shape \(2,\)"),
        (held, x[:, :2], dict(mask=SequenceDescriptor.from_segment_ids_and_pos(ids)), ValueError, "has segments"),
    ):
        with pytest.raises(error, match=text):
            call(cache, inputs, **options)
    call(lacks("cache_padding"), x[:, :2])  # as other libraries' caches do
    with pytest.raises(ValueError, match="decode=True is for self-attention"):
        jax.eval_shape(lambda: module.init(KEY, x, x[:, :3], decode=True))
    with pytest.raises(ValueError, match="12 tokens, but the cache has 5 slots"):
        jax.eval_shape(lambda: module.init(KEY, x, decode=True, max_decode_length=5))
    with pytest.raises(ValueError, match="'cube'"):
        module = mha(attn_mask_type="cube")
        call(held, x[:, :1])
