"""DotProductAttention, MultiHeadAttention, RelativePositionBiases: numbers, trees, keys, errors."""

import flax
import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from quick_init import quick_init

import te_jax.flax as te_flax
from te_jax.ops.attention import SequenceDescriptor

KEY = jax.random.key(0)
CLOSE = dict(rtol=3e-5, atol=3e-5)  # float32 sums of at most 100 terms of order 1, twice


def data(*shape, dtype=jnp.float32, seed=1):
    return on_device(np.random.default_rng(seed).normal(size=shape), dtype)


def core(**fields):
    return te_flax.DotProductAttention(
        **{"head_dim": 8, "num_attention_heads": 4, "attn_mask_type": "no_mask", **fields}
    )


def qkv(b=2, s=5, t=7, h=4, g=4, d=8, dv=8):
    return data(b, s, h, d), data(b, t, g, d, seed=2), data(b, t, g, dv, seed=3)


# -- DotProductAttention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
@pytest.mark.parametrize("g", [4, 2, 1])
def test_core(mask_type, g):
    q, k, v = qkv(g=g, dv=6)
    got = core(num_gqa_groups=g, attn_mask_type=mask_type).apply({}, q, k, v)
    masked = ref.causal(5, 7) if mask_type == "causal" else None
    np.testing.assert_allclose(got, ref.attention(*map(ref.f64, (q, k, v)), masked), **CLOSE)
    assert got.shape == (2, 5, 4, 6)


def test_core_passes_every_field_on():
    q, k, v = qkv()
    bias, mask = data(1, 4, 5, 7, seed=4), data(2, 1, 5, 7, seed=5) > 0.5
    f64 = [ref.f64(x) for x in (q, k, v)]
    b64 = ref.f64(bias)
    for fields, kwargs, want in (
        (dict(scale_factor=0.7), {}, dict(scale=0.7)),
        ({}, dict(bias=bias), dict(bias=b64)),
        (dict(attn_bias_type="pre_scale_bias"), dict(bias=bias), dict(bias=b64, pre_scale=True)),
        ({}, dict(mask=mask), dict(masked=np.asarray(mask))),
        (dict(attn_mask_type="causal"), dict(mask=mask), dict(masked=np.asarray(mask) | ref.causal(5, 7))),
        (dict(window_size=(1, 2)), {}, dict(masked=np.abs(np.arange(7) - np.arange(5)[:, None] - 0.5) > 1.6)),
        (dict(softmax_type="off_by_one"), {}, dict(offset=np.zeros(4))),
        (
            dict(softmax_type="off-by-one", float32_logits=True, dtype=jnp.float32),
            {},
            dict(offset=np.zeros(4)),
        ),
    ):
        got = jax.jit(core(**fields).apply)({}, q, k, v, **kwargs)
        np.testing.assert_allclose(got, ref.attention(*f64, **want), **CLOSE, err_msg=str(fields))
    lengths = SequenceDescriptor.from_seqlens((jnp.asarray([5, 3]), jnp.asarray([7, 2])))
    got = jax.jit(core(attn_mask_type="padding").apply)({}, q, k, v, lengths)
    hidden = np.arange(7) >= np.asarray([7, 2])[:, None, None, None]
    np.testing.assert_allclose(got[0], ref.attention(*f64, hidden)[0], **CLOSE)
    np.testing.assert_allclose(got[1, :3], ref.attention(*f64, hidden)[1, :3], **CLOSE)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["bs3hd", "BSHD_BS2HD", "bshd_bshd_bshd", "t3hd", "thd_t2hd", "thd_thd_thd"])
def test_layouts(layout, transposed):
    q, k, v = qkv(t=5)
    packed = layout.lower().startswith("t")
    ids = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray([[1, 1, 2, 2, 0]] * 2)) if packed else None
    mask_type = "padding_causal" if packed else "causal"
    want = jax.jit(core(attn_mask_type=mask_type).apply)({}, q, k, v, ids)
    if "3" in layout:
        arrays = (np.stack([q, k, v], 2),)
    elif "2" in layout:
        arrays = (q, np.stack([k, v], 2))
    else:
        arrays = (q, k, v)
    swap = (lambda x: np.swapaxes(x, 0, 1)) if transposed else lambda x: x
    module = core(qkv_layout=layout, attn_mask_type=mask_type, transpose_batch_sequence=transposed)
    arrays = (*map(swap, arrays), *[None] * (3 - len(arrays)))
    np.testing.assert_allclose(swap(jax.jit(module.apply)({}, *arrays, ids)), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scope", ["_FusedDotProductAttention_0", "_UnfusedDotProductAttention_0"])
def test_learnable_softmax_offset(scope):
    q, k, v = qkv()
    module = core(softmax_type="learnable")
    fresh = quick_init(module.init)(KEY, q, k, v)["params"]
    assert ref.shapes(fresh) == {"_FusedDotProductAttention_0": {"softmax_offset": (1, 4, 1, 1)}}
    box = fresh["_FusedDotProductAttention_0"]["softmax_offset"]
    assert box.names == (None, "nvte_head", None, None) and box.value.dtype == jnp.float32 and not box.value.any()
    offset = jnp.asarray([0.5, -1.0, 2.0, 0.0])
    got = module.apply({"params": {scope: {"softmax_offset": offset.reshape(1, 4, 1, 1)}}}, q, k, v)
    np.testing.assert_allclose(got, ref.attention(*map(ref.f64, (q, k, v)), offset=ref.f64(offset)), **CLOSE)


def test_max_logit():
    q, k, v = qkv()
    out, top = core(return_max_logit=True).apply({}, q, k, v)
    logits = np.einsum("bshd,bthd->bhst", ref.f64(q), ref.f64(k)) / np.sqrt(8)
    np.testing.assert_allclose(top, logits.max((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(out, core().apply({}, q, k, v))


def test_dropout_uses_its_stream():
    q, k, v = qkv()
    module = core(attention_dropout=0.5, dropout_rng_name="mine")
    still = module.apply({}, q, k, v, deterministic=True)
    np.testing.assert_allclose(still, core().apply({}, q, k, v))
    draws = [module.apply({}, q, k, v, rngs={"mine": jax.random.key(i)}) for i in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.allclose(draws[0], draws[2]) and not np.allclose(draws[0], still)
    with pytest.raises(flax.errors.InvalidRngError, match=r"dropout needs a key; pass rngs=\{'mine': key\} to apply"):
        module.apply({}, q, k, v)


@pytest.mark.parametrize(
    ("fields", "kwargs", "error", "text"),
    [
        (dict(attn_mask_type="triangular"), {}, ValueError, "'triangular'"),
        (dict(attn_bias_type="alibi"), {}, ValueError, "'alibi'"),
        (dict(attn_bias_type="no_bias"), dict(bias=jnp.ones((1, 4, 5, 7))), ValueError, "no_bias"),
        (dict(attn_bias_type="post_scale_bias"), {}, ValueError, "bias is None"),
        (dict(softmax_type="sparse"), {}, ValueError, "'sparse'"),
        (dict(qkv_layout="sbhd"), {}, ValueError, "'sbhd'"),
        (dict(qkv_layout="bs3hd"), {}, ValueError, "key must be None"),
        (dict(qkv_layout="thd_thd_thd"), {}, ValueError, "sequence_descriptor"),
        (dict(num_gqa_groups=3), {}, ValueError, "num_attention_heads=4 .* num_gqa_groups=3"),
        (dict(num_gqa_groups=2), {}, ValueError, "key has shape .* 2 heads of width 8"),
        (dict(head_dim=16), {}, ValueError, "query has shape .* 4 heads of width 16"),
        (dict(dtype=jnp.bfloat16), {}, ValueError, "dtype is bfloat16, query is float32"),
        pytest.param(
            dict(context_parallel_axis="cp"),
            {},
            ValueError,
            "context_parallel_axis is 'cp', but the mesh in force is none; enter jax.set_mesh",
            marks=pytest.mark.skipif(jax.device_count() == 1, reason="one device has the whole sequence"),
        ),
        (
            dict(context_parallel_causal_load_balanced=True),
            {},
            ValueError,
            "load_balanced is True, but no axis cuts the sequence; set context_parallel_axis",
        ),
        (dict(context_parallel_strategy="STAR"), {}, ValueError, "'STAR'"),
        (dict(score_mod=max), {}, ValueError, "score_mod=.* is not in this version"),
        ({}, dict(score_mod_tensors={}), ValueError, "score_mod_tensors=.* is not in this version"),
    ],
)
def test_core_errors(fields, kwargs, error, text):
    with pytest.raises(error, match=text):
        core(**fields).apply({}, *qkv(), **kwargs)


def test_core_refuses_integers():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="key is int32"):
        core().apply({}, q, k.astype(jnp.int32), v)


# -- MultiHeadAttention --------------------------------------------------------------------------------------

H, D, N = 12, 6, 4  # width, head width, heads


def mha(**fields):
    return te_flax.MultiHeadAttention(**{"head_dim": D, "num_attention_heads": N, **fields})


def tree(self_attention=True, g=N, fuse=True, bias=False, norm="layernorm", width=H, kv_width=H):
    """TransformerEngine's tree: {path: (shape, logical axes)}."""
    hd, gd, w = N * D, g * D, "nvte_w_"
    fsdp, tp, joined, none = w + "fsdp", w + "tp", w + "joined", w + "no_shard"
    first = "qkv" if self_attention and g == N and fuse else "query"
    out = {("out", "kernel"): ((hd, width), (tp, fsdp)), ("out", "bias"): ((width,), (none,))}
    if norm:
        out[first, "scale"] = ((width,), (none,))
    if norm == "layernorm":
        out[first, "ln_bias"] = ((width,), (none,))
    if first == "qkv":
        out["qkv", "kernel"] = ((width, 3, hd), (fsdp, joined, tp))
        out["qkv", "bias"] = ((3, hd), (joined, tp))
    else:
        out["query", "kernel"] = ((width, hd), (fsdp, tp))
        out["query", "bias"] = ((hd,), (tp,))
        for name in ("kv",) if fuse else ("key", "value"):
            shape, axes = ((2, gd), (joined, tp)) if fuse else ((gd,), (tp,))
            out[name, "kernel"] = ((kv_width, *shape), (fsdp, *axes))
            out[name, "bias"] = (shape, axes)
    return {path: leaf for path, leaf in out.items() if bias or path[-1] != "bias"}


def boxes(params):
    flat = flax.traverse_util.flatten_dict(params)
    return {path: (box.value.shape, box.names) for path, box in flat.items()}


@pytest.mark.parametrize("g", [4, 2])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("norm", "bias"), [("layernorm", True), ("rmsnorm", False), (None, True)])
def test_mha(g, fuse, cross, norm, bias):
    x, kv = data(2, 5, H), (data(2, 7, 10, seed=2) if cross else None)
    fields = dict(layernorm_type=norm) if norm else dict(input_layernorm=False)
    module = mha(num_gqa_groups=g, fuse_qkv_params=fuse, use_bias=bias, return_layernorm_output=True, **fields)
    fresh = jax.eval_shape(module.init, KEY, x, kv)["params"]
    assert boxes(fresh) == tree(not cross, g, fuse, bias, norm, kv_width=10 if cross else H)
    params = ref.filled(fresh)
    out, ln_out = jax.jit(module.apply)({"params": params}, x, kv)
    kv64 = None if kv is None else ref.f64(kv)
    masked = ref.causal(5, 7 if cross else 5)
    want, want_ln = ref.mha(ref.f64(x), ref.f64(params), N, g, kv64, norm or "", masked)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(ln_out, want_ln, **CLOSE)


def test_norm_output_is_returned_where_keys_read_it():
    x = data(2, 5, H)
    for fields, there in (
        (dict(), False),
        (dict(num_gqa_groups=2), True),
        (dict(fuse_qkv_params=False), True),
    ):
        module = mha(**fields)
        assert (jax.eval_shape(module.init_with_output, KEY, x)[0][1] is not None) == there


@pytest.mark.parametrize(
    "fields", [dict(scale_attn_logits=False), dict(enable_rotary_pos_emb=True), dict(num_gqa_groups=2)]
)
def test_mha_fields(fields):
    x, bias = data(2, 5, H), data(1, N, 5, 5, seed=3)
    module = mha(**fields)
    params = ref.filled(jax.eval_shape(module.init, KEY, x)["params"])
    flipped = mha(**fields, transpose_batch_sequence=True)

    @jax.jit
    def run(params, x):
        swapped = flipped.apply({"params": params}, jnp.swapaxes(x, 0, 1), bias=bias)[0]
        return module.apply({"params": params}, x, bias=bias)[0], jnp.swapaxes(swapped, 0, 1)

    out, of_flipped = run(params, x)
    scale = 1.0 if "scale_attn_logits" in fields else None
    rope, g = {} if "enable_rotary_pos_emb" in fields else None, fields.get("num_gqa_groups")
    want = ref.mha(
        ref.f64(x), ref.f64(params), N, g, masked=ref.causal(5, 5), bias=ref.f64(bias), scale=scale, rope=rope
    )
    np.testing.assert_allclose(out, want[0], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(of_flipped, out, rtol=1e-5, atol=1e-6)


def test_rope_positions():
    x = data(2, 6, H)
    module = mha(enable_rotary_pos_emb=True, attn_mask_type="padding_causal")
    variables = quick_init(module.init)(KEY, x)
    apply = jax.jit(lambda *args, **kwargs: module.apply(variables, *args, **kwargs)[0])
    # Attention sees only differences of positions: a shift changes nothing, a stretch does.
    np.testing.assert_allclose(apply(x, positions=jnp.arange(6) + 50), apply(x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(apply(x, positions=jnp.arange(6) * 3), apply(x), atol=1e-3)
    # Two segments in a row give what each gives by itself.
    packed = apply(x, mask=SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray([[1, 1, 2, 2, 2, 2]] * 2)))
    np.testing.assert_allclose(packed[:, :2], apply(x[:, :2]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[:, 2:], apply(x[:, 2:]), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="positions are for self-attention"):
        jax.eval_shape(mha(enable_rotary_pos_emb=True).init, KEY, x, x + 1, positions=jnp.arange(6))
    with pytest.raises(ValueError, match="enable_rotary_pos_emb"):
        jax.eval_shape(mha().init, KEY, x, positions=jnp.arange(6))


@pytest.mark.parametrize("scope", ["all", "qkv_proj", "output_proj", "none", "exclude_mlp", "exclude_qkv_proj"])
@pytest.mark.parametrize("g", [4, 2])
def test_mha_lora(scope, g):
    x = data(2, 5, H)
    module = mha(
        num_gqa_groups=g,
        low_rank_adaptation_scope=scope,
        low_rank_adaptation_dim=3,
        low_rank_adaptation_alpha=2.0,
    )
    fresh = jax.eval_shape(module.init, KEY, x)["params"]
    names = {path for path in boxes(fresh) if path[-1] == "lora_a_kernel"}
    qkv_names = {("qkv", "lora_a_kernel")} if g == 4 else {("query", "lora_a_kernel"), ("kv", "lora_a_kernel")}
    adapts = {"all": (1, 1), "qkv_proj": (1, 0), "output_proj": (0, 1), "none": (0, 0), "exclude_mlp": (1, 1)}
    on = adapts.get(scope, (0, 1))
    assert names == (qkv_names if on[0] else set()) | ({("out", "lora_a_kernel")} if on[1] else set())
    if g == 4 and on[0]:
        assert boxes(fresh)["qkv", "lora_a_kernel"][0] == (H, 3, 3)
        assert boxes(fresh)["qkv", "lora_b_kernel"][0] == (3, 3, N * D)
    params = ref.filled(fresh)
    want = ref.mha(ref.f64(x), ref.f64(params), N, g, masked=ref.causal(5, 5), alpha=2.0)[0]
    np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x)[0], want, rtol=1e-4, atol=5e-5)


def test_keys_and_scaled_query_init():
    """qkv splits its key in 3, kv in 2; each part is drawn as (in, out)."""
    drawn = []

    def record(key, shape, dtype):
        drawn.append((np.asarray(jax.random.key_data(key)), shape))
        return jnp.ones(shape, dtype)

    class Probe(nn.Module):  # as many draws as the module makes before its kernel, in a scope of that name
        draws: int

        @nn.compact
        def __call__(self):
            for i in range(self.draws):
                self.param(f"p{i}", record, (1,), jnp.float32)

    class Probes(nn.Module):
        @nn.compact
        def __call__(self):
            Probe(3, name="qkv")()
            Probe(1, name="kv")()

    x = data(1, 3, H)
    mha(kernel_init=record).init(KEY, x)
    mha(kernel_init=record, num_gqa_groups=2).init(KEY, x)
    got, drawn[:] = list(drawn), []
    Probes().init(KEY)
    qkv_key, kv_key = (jax.random.wrap_key_data(drawn[i][0]) for i in (2, 3))
    for (data_of, shape), key in zip(got[:3], jax.random.split(qkv_key, 3), strict=True):
        assert shape == (H, N * D) and (data_of == np.asarray(jax.random.key_data(key))).all()
    kv = [data_of for data_of, shape in got[4:] if shape == (H, 2 * D)]
    for data_of, key in zip(kv, jax.random.split(kv_key), strict=True):
        assert (data_of == np.asarray(jax.random.key_data(key))).all()
    kernel = ref.unboxed(mha(kernel_init=record, scaled_query_init=True).init(KEY, x)["params"])["qkv"]["kernel"]
    np.testing.assert_allclose(kernel[:, 0], D**-0.5, rtol=1e-6)
    np.testing.assert_array_equal(kernel[:, 1:], 1)


def test_lost_identity_follows_the_parameters():
    x = data(2, 5, H)
    module = mha()
    variables = quick_init(module.init)(KEY, x)
    want = module.apply(variables, x)[0]
    np.testing.assert_array_equal(module.apply(variables, x, x)[0], want)
    lost = jax.jit(lambda v, a, b: module.apply(v, a, b)[0])(variables, x, x)
    np.testing.assert_allclose(lost, want, rtol=1e-6, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"hold \('qkv',\), but cross-attention .* reads \('query', 'kv'\).*inputs_kv=None"
    ):
        module.apply(variables, x, data(2, 6, H))
    with pytest.raises(ValueError, match="fuse_qkv_params=False"):
        mha(fuse_qkv_params=False).apply(variables, x)
    other = quick_init(mha().init)(KEY, x, data(2, 6, H))
    with pytest.raises(ValueError, match=r"hold \('query', 'kv'\), but self-attention .* reads \('qkv',\)"):
        module.apply(other, x)


def test_checkpoint_names():
    x, kv = data(2, 5, H), data(2, 7, H)

    def names(module, *args):
        text = str(jax.make_jaxpr(lambda: module.init_with_output(KEY, *args)[0][0])())
        every = "combined_qkv_proj combined_kv_proj query_proj key_proj value_proj context out_proj".split()
        return {name for name in every if f"name={name}]" in text}

    assert names(mha(), x) == {"combined_qkv_proj", "context", "out_proj"}
    assert names(mha(), x, kv) == {"query_proj", "combined_kv_proj", "context", "out_proj"}
    assert names(mha(fuse_qkv_params=False), x) == {
        "query_proj",
        "key_proj",
        "value_proj",
        "context",
        "out_proj",
    }


@pytest.mark.parametrize(
    ("fields", "kwargs", "error", "text"),
    [
        (
            dict(num_heads=4, num_attention_heads=None),
            {},
            ValueError,
            "num_heads is an older name; use num_attention_heads",
        ),
        (dict(dropout_rate=0.1), {}, ValueError, "use attention_dropout"),
        (dict(fuse_qkv=True), {}, ValueError, "use fuse_qkv_params"),
        (dict(output_layernorm=False), {}, ValueError, "use input_layernorm"),
        (dict(head_dim=None), {}, ValueError, "head_dim is None"),
        (dict(num_gqa_groups=3), {}, ValueError, "num_gqa_groups=3"),
        (dict(low_rank_adaptation_scope="some"), {}, ValueError, "'some'"),
        (dict(layernorm_type="none"), {}, ValueError, "'none'"),
        (dict(attn_mask_type="square"), {}, ValueError, "'square'"),
        (dict(score_mod=max), {}, ValueError, "score_mod"),
        ({}, dict(inputs_kv=jnp.ones((2, 5))), ValueError, "inputs_kv has shape"),
        ({}, dict(inputs_kv=jnp.ones((2, 5, 3), jnp.int32)), TypeError, "inputs_kv is int32"),
    ],
)
def test_mha_errors(fields, kwargs, error, text):
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda: mha(**fields).init(KEY, data(2, 5, H), **kwargs))


def test_mha_fields_in_declaration_order():
    names = (
        "head_dim num_attention_heads num_gqa_groups attention_dropout dropout_rng_name input_layernorm "
        "layernorm_type layernorm_epsilon return_layernorm_output zero_centered_gamma kernel_init use_bias "
        "bias_init attn_mask_type attn_bias_type enable_rotary_pos_emb rotary_pos_emb_windows "
        "rotary_pos_emb_group_method low_rank_adaptation_scope low_rank_adaptation_dim "
        "low_rank_adaptation_alpha dtype fuse_qkv_params transpose_batch_sequence enable_sequence_parallel "
        "scale_attn_logits scaled_query_init float32_logits window_size softmax_type score_mod "
        "score_mod_bprop num_heads dropout_rate output_layernorm apply_residual_connection_post_layernorm "
        "fuse_qkv"
    ).split()
    assert list(te_flax.MultiHeadAttention.__dataclass_fields__)[: len(names)] == names
    names = (
        "head_dim num_attention_heads num_gqa_groups attention_dropout attn_mask_type attn_bias_type dtype "
        "dropout_rng_name float32_logits qkv_layout scale_factor transpose_batch_sequence window_size "
        "max_segments_per_seq context_parallel_causal_load_balanced context_parallel_axis "
        "context_parallel_strategy context_checkpoint_name softmax_type score_mod score_mod_bprop "
        "return_max_logit"
    ).split()
    assert list(te_flax.DotProductAttention.__dataclass_fields__)[: len(names)] == names


# -- RelativePositionBiases ----------------------------------------------------------------------------------


def bucket(relative, num_buckets, max_distance, bidirectional):
    """T5's published rule, one pair at a time."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    log = np.log(np.float32(distance) / np.float32(exact) + np.finfo(np.float32).eps) / np.log(max_distance / exact)
    return first + min(exact + int(log * (num_buckets - exact)), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_relative_position_biases(bidirectional, num_buckets, max_distance):
    module = te_flax.RelativePositionBiases(num_buckets, max_distance, num_attention_heads=3)
    params = jax.jit(lambda: module.init(KEY, 4, 4))()["params"]
    assert boxes(params) == {("rel_embedding",): ((3, num_buckets), ("heads", "relpos_buckets"))}
    got = module.apply({"params": params}, 150, 199, bidirectional)
    table = np.asarray(params["rel_embedding"].value)
    index = [[bucket(t - s, num_buckets, max_distance, bidirectional) for t in range(199)] for s in range(150)]
    np.testing.assert_array_equal(got, table[None, :, index])
    row = jax.jit(lambda at: module.apply({"params": params}, 1, 199, bidirectional, q_offset=at))(jnp.asarray(77))
    np.testing.assert_array_equal(row, got[:, :, 77:78])
    rows = jax.jit(lambda at: module.apply({"params": params}, 2, 199, bidirectional, q_offset=at))(
        jnp.arange(0, 99, 9)
    )
    assert rows.shape == (11, 3, 2, 199)
    for i, each in enumerate(rows):
        np.testing.assert_array_equal(each, got[0, :, 9 * i : 9 * i + 2])


def test_relative_position_biases_errors():
    make = te_flax.RelativePositionBiases
    for fields, args, text in (
        ((32, 128, 4), (4.0, 4), "q_seqlen is 4.0"),
        ((32, 128, 4), (4, 0), "k_seqlen is 0"),
        ((5, 128, 4), (4, 4), "num_buckets=5"),
        ((32, 8, 4), (4, 4), "max_distance=8"),
    ):
        with pytest.raises(ValueError, match=text):
            make(*fields).init(KEY, *args)
