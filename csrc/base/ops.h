// The launchers of all ops, for whoever calls them: handlers.cc for XLA, c_api.cc for C programs. A launcher
// checks every operand and result, then enqueues its kernels on the stream; it neither allocates nor
// synchronizes. The comments give shapes: arrays are row-major, `m...` is any number of axes, `?` marks an
// array that may be absent, which then has no elements. `..._partials` [count, ...] is room for the partials
// that a kernel leaves, of which the launcher makes the result, such as amax f32 [] of amax_partials;
// scale_inv? f32 [] is 1 / scale.
#pragma once

#include "base/tensor.h"

#pragma GCC visibility push(default)  // libte_jax.so has them, the extension calls them
namespace te {

// FP8 with one scale. x [m..., n...], whose first `split` axes are m; scale? f32 [] -> data? [m..., n...],
// data_t? [n..., m...], amax?, dbias? f32 [n...], scale_inv?; amax_partials? f32 [ceil(m / 256), ceil(n /
// 64)], dbias_partials? f32 [ceil(m / 256), n...].
Status LaunchQuantize(cudaStream_t stream, Arg x, Arg scale, Ret data, Ret data_t, Ret amax, Ret dbias,
                      Ret scale_inv, Ret amax_partials, Ret dbias_partials, int64_t split);

// FP8 with one scale for each expert. x [e..., m..., n...], whose first `stack` axes are e, and the next
// `split` m; y? as x; a: an axis of 2 with y (slots is 1), else none (0); scale? f32 [e...] -> data? [e...,
// m..., a, n...], data_t? [e..., a, n..., m...], amax? f32 [e...]; amax_partials? f32 [ceil(m / 256), ceil(n
// / 64), e...].
Status LaunchQuantizeStacked(cudaStream_t stream, Arg x, Arg y, Arg scale, Ret data, Ret data_t, Ret amax,
                             Ret amax_partials, int64_t stack, int64_t slots, int64_t split);

// FP8 with a scale for each block of 128. x [m..., p, n..., q], where m are the first `lead` axes -> data? as
// x, data_t? [n..., q, m..., p]; of blocks 1 x 128 scale_inv? f32 [n..., q/128, m..., p], scale_inv_t? f32
// [m..., p/128, n..., q]; of blocks 128 x 128 (square) block_inv? f32 [m..., p/128, n..., q/128],
// block_inv_t? f32 [n..., q/128, m..., p/128]; dbias? f32 [n..., q], dbias_partials? f32 [m * p/128, n...,
// q].
Status LaunchQuantizeBlock(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t,
                           Ret block_inv, Ret block_inv_t, Ret dbias, Ret dbias_partials, int64_t lead,
                           bool square, bool power_2, double epsilon);

// FP8 with a scale for each block of 128 x 128 of each expert. x [e..., m..., p, n..., q], whose first
// `stack` axes are e, and the next `lead` m; y? and a as above -> data? [e..., m..., p, a, n..., q], data_t?
// [e..., a, n..., q, m..., p], block_inv? f32 [e..., m..., p/128, a, n..., q/128], block_inv_t? f32 [e..., a,
// n..., q/128, m..., p/128].
Status LaunchQuantizeStackedBlock(cudaStream_t stream, Arg x, Arg y, Ret data, Ret data_t, Ret block_inv,
                                  Ret block_inv_t, int64_t stack, int64_t slots, int64_t lead, bool power_2,
                                  double epsilon);

// The activation of the MLP, of a slots (1 or 2), and its gradient, to FP8 with one scale. x [m..., a, f],
// scale? f32 [] -> y? [m..., f], data? [m..., f], data_t? [f, m...], amax?, scale_inv?; amax_partials? f32
// [ceil(m / 256), ceil(f / 64)].
Status LaunchActivationFwd(cudaStream_t stream, Arg x, Arg scale, Ret y, Ret data, Ret data_t, Ret amax,
                           Ret scale_inv, Ret amax_partials, int64_t kind, double limit, double alpha,
                           double glu_linear_offset);

// dy [m..., f] and x, scale as above -> dx? [m..., a, f], data? [m..., a, f], data_t? [a, f, m...], amax?,
// dbias? f32 [a, f], scale_inv?; amax_partials? as above, dbias_partials? f32 [ceil(m / 256), a, f].
Status LaunchActivationBwd(cudaStream_t stream, Arg dy, Arg x, Arg scale, Ret dx, Ret data, Ret data_t,
                           Ret amax, Ret dbias, Ret scale_inv, Ret amax_partials, Ret dbias_partials,
                           int64_t kind, double limit, double alpha, double glu_linear_offset);

// The two with a scale for each block of 128. x [m..., a, f], m of one axis or more -> data?, data_t? as
// above, scale_inv? f32 [f/128, m...], scale_inv_t? f32 [m.../128, f]: the last axis of m in blocks.
Status LaunchActivationBlockFwd(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, int64_t kind, double limit, double alpha,
                                double glu_linear_offset, bool power_2, double epsilon);

// dy [m..., f] and x -> data?, data_t? as above, scale_inv? f32 [a, f/128, m...], scale_inv_t? f32 [m.../128,
// a, f], dbias? f32 [a, f], dbias_partials? f32 [count, a, f].
Status LaunchActivationBlockBwd(cudaStream_t stream, Arg dy, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, Ret dbias, Ret dbias_partials, int64_t kind, double limit,
                                double alpha, double glu_linear_offset, bool power_2, double epsilon);

// LayerNorm and RMSNorm of the last axis. x [..., h], gamma [h], beta? [h], known_mean?, known_rstd? f32
// [...] (the statistics, which are no results then), scale? f32 [] -> y? [..., h], data? [..., h], data_t?
// [h, ...], mean? f32 [...], rstd? f32 [...], amax?, scale_inv?; workspace u8 [8 * rows] where data_t is
// there and the statistics are not known; amax_partials? f32 [ceil(rows / 256), max(64, ceil(h / 64))].
Status LaunchNormFwd(cudaStream_t stream, Arg x, Arg gamma, Arg beta, Arg known_mean, Arg known_rstd,
                     Arg scale, Ret y, Ret data, Ret data_t, Ret mean, Ret rstd, Ret amax, Ret scale_inv,
                     Ret workspace, Ret amax_partials, double eps, bool rms, bool zero_centered);

// The norms to FP8 with a scale for each block of 128. x [m..., h], m of one axis or more -> data? [m..., h],
// data_t? [h, m...], scale_inv? f32 [h/128, m...], scale_inv_t? f32 [m.../128, h], mean?, rstd, workspace.
Status LaunchNormBlockFwd(cudaStream_t stream, Arg x, Arg gamma, Arg beta, Ret data, Ret data_t,
                          Ret scale_inv, Ret scale_inv_t, Ret mean, Ret rstd, Ret workspace, double eps,
                          bool rms, bool zero_centered, bool power_2, double epsilon);

// dy, x, dres? [..., h], mean? and rstd f32 [...], gamma [h] -> dx [..., h], dgamma [h] and dbeta? [h] of
// gamma's type; dgamma_partials f32 [count, h], dbeta_partials? f32 [count, h], for any count.
Status LaunchNormBwd(cudaStream_t stream, Arg dy, Arg x, Arg mean, Arg rstd, Arg gamma, Arg dres, Ret dx,
                     Ret dgamma, Ret dbeta, Ret dgamma_partials, Ret dbeta_partials, bool rms,
                     bool zero_centered);

// The gated RMSNorm of Mamba-2, in groups. x, z [..., g, c] of one type, gamma [g, c], known_rstd? f32 [...,
// g] (which is no result then), scale? f32 [] -> y? [..., g, c], data? [..., g, c], data_t? [g, c, ...],
// rstd? f32 [..., g], amax?, scale_inv?; workspace u8 [8 * rows * g] where rstd is not known; amax_partials?
// f32 [ceil(rows / 256), max(64, ceil(g * c / 64))].
Status LaunchGatedNormFwd(cudaStream_t stream, Arg x, Arg z, Arg gamma, Arg known_rstd, Arg scale, Ret y,
                          Ret data, Ret data_t, Ret rstd, Ret amax, Ret scale_inv, Ret workspace,
                          Ret amax_partials, double eps, bool norm_before_gate);

// The same to FP8 with a scale for each block of 128. x, z [m..., g, c], m of one axis or more -> data?
// [m..., g, c], data_t? [g, c, m...], scale_inv? f32 [g, c/128, m...], scale_inv_t? f32 [m.../128, g, c],
// rstd, workspace.
Status LaunchGatedNormBlockFwd(cudaStream_t stream, Arg x, Arg z, Arg gamma, Ret data, Ret data_t,
                               Ret scale_inv, Ret scale_inv_t, Ret rstd, Ret workspace, double eps,
                               bool norm_before_gate, bool power_2, double epsilon);

// dy, x, z [..., g, c], rstd f32 [..., g], gamma [g, c] -> dx, dz [..., g, c], dgamma [g, c] of gamma's type;
// dgamma_partials f32 [count, g, c], for any count.
Status LaunchGatedNormBwd(cudaStream_t stream, Arg dy, Arg x, Arg z, Arg rstd, Arg gamma, Ret dx, Ret dz,
                          Ret dgamma, Ret dgamma_partials, bool norm_before_gate);

// A causal convolution of each channel over a few tokens. x [b, s, c], kernel f32 [width, c], bias? f32 [c],
// runs? i32 [b, s], a number for each run of tokens that belong together, initial? [b, width - 1, c] of x's
// type -> y as x, last? as initial: the inputs that the next token sees. width is 2 to 4, c a multiple of 8.
Status LaunchConvFwd(cudaStream_t stream, Arg x, Arg kernel, Arg bias, Arg runs, Arg initial, Ret y, Ret last,
                     bool silu, int64_t width);

// dy as x, dlast? as last, the rest as above -> dx as x, dkernel f32 [width, c], dbias? f32 [c], dinitial? as
// initial; of b max(1, ceil(s / 128)) partials.
Status LaunchConvBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg x, Arg kernel, Arg bias, Arg runs,
                     Arg initial, Ret dx, Ret dkernel, Ret dbias, Ret dinitial, Ret dkernel_partials,
                     Ret dbias_partials, bool silu, int64_t width);

// The state-space dual. x bf16 [b, s, h, p], dt bf16 or f32 [b, s, h], A f32 [h], B, C bf16 [b, s, g, n], D?
// f32 [h, 1 or p], z? as x, dt_bias? f32 [h], runs? i32 [b, s], a number for each run of tokens that belong
// together, initial? f32 [b, h, p, n] -> y as x, last? f32 [b, h, p, n], states? f32 [b, ceil(s / 512), h, p,
// n]: before each 512 tokens. shared: h / g, or 1 if g is. p and n are multiples of 8, n at most 256.
// workspace: 512 bytes for each 64 tokens of a head.
Status LaunchSsdFwd(cudaStream_t stream, Arg x, Arg dt, Arg A, Arg B, Arg C, Arg D, Arg z, Arg dt_bias,
                    Arg runs, Arg initial, Ret y, Ret last, Ret states, Ret workspace, bool softplus,
                    double least, double most, int64_t shared);

// dy as x, dlast? as last, the rest as above but z, D f32 [h, 1], states that the forward pass kept -> dx as
// x, ddt as dt, dA f32 [h], dB, dC as B, dD? f32 [h, 1], ddt_bias? f32 [h], dinitial? as initial. n is at
// most 128. The partials are [b ceil(s / 64), ..]. In slabs of slab_rows rows and slab_tokens tokens (a
// multiple of 512, or of 64 and s or more), with CTAs of slab_heads heads; workspace, each part a multiple of
// 256 bytes: as the forward pass has it, 1552 bytes for each 64 tokens of a head of a slab, the state f32
// [b, h, p, n] unless dinitial is there, twice bf16 [slab_rows, slab_tokens / 64, h, p, n], twice f32
// [slab_rows, slab_tokens, g, ceil(h / g / slab_heads), n].
Status LaunchSsdBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg x, Arg dt, Arg A, Arg B, Arg C, Arg D,
                    Arg dt_bias, Arg runs, Arg states, Ret dx, Ret ddt, Ret dA, Ret dB, Ret dC, Ret dD,
                    Ret ddt_bias, Ret dinitial, Ret workspace, Ret dA_partials, Ret dD_partials,
                    Ret ddt_bias_partials, bool softplus, double least, double most, int64_t shared,
                    int64_t slab_rows, int64_t slab_tokens, int64_t slab_heads);

// The gated delta rule, with a gate for each head or channel of keys. q, k bf16 [b, s, g, d], v bf16 [b, s,
// h, e], beta f32 [b, s, h], gate f32 [b, s, h, 1] or [b, s, h, d], runs? as above, initial? f32 [b, h, d, e]
// -> y as v, last? f32 [b, h, d, e], states? f32 [b, ceil(s / 1024), h, d, e]: before each 1024 tokens.
// shared as above. d and e are multiples of 8, d at most 128, e 512; with a gate for each head, at least one
// token and compute capability 9.0, d at most 256. workspace: for each 64 tokens of a head 18448 bytes; with
// gates of channels 41600, or 66432 of more than 64.
Status LaunchGatedDeltaFwd(cudaStream_t stream, Arg q, Arg k, Arg v, Arg beta, Arg gate, Arg runs,
                           Arg initial, Ret y, Ret last, Ret states, Ret workspace, double scale,
                           bool normalize, int64_t shared);

// dy as v, dlast? as last, the rest as above, states that the forward pass kept -> dq, dk as q, dv as v,
// dbeta, dgate, dinitial? as initial. In slabs of slab_rows rows and slab_tokens tokens (a multiple of 1024,
// or of 64 and s or more); workspace, each part a multiple of 256 bytes: as the forward pass has it, of a
// slab; the state f32 [b, h, d, e] unless dinitial is there; and of a slab twice bf16 [slab_rows, slab_tokens
// / 64, h, e, d], then twice bf16 [slab_rows, slab_tokens, h, e].
Status LaunchGatedDeltaBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg q, Arg k, Arg v, Arg beta, Arg gate,
                           Arg runs, Arg states, Ret dq, Ret dk, Ret dv, Ret dbeta, Ret dgate, Ret dinitial,
                           Ret workspace, double scale, bool normalize, int64_t shared, int64_t slab_rows,
                           int64_t slab_tokens);

// x [..., s, n, h, d], of whose n slots the first `turned` turn; positions f32 [..., s], inv_freq f32 [r] ->
// y as x.
Status LaunchRope(cudaStream_t stream, Arg x, Arg positions, Arg inv_freq, Ret y, bool consecutive,
                  bool inverse, int64_t turned);

// One step of delayed scaling of n tensors, at most kMostStates. scales f32 [n, b...], histories f32 [n,
// b..., l], amaxes? f32 [n, b...] (absent: the states stay as they are), fp8_max? f32 [n] -> of each tensor
// new_scale [b...] and new_history [b..., l]; behind the results of the last tensor the others are absent.
constexpr int kMostStates = 32;
Status LaunchScaleUpdate(cudaStream_t stream, Arg scales, Arg histories, Arg amaxes, Arg fp8_max,
                         Rets results, int64_t interval, double margin, bool newest);

// lhs [m..., k...], rhs [n..., k...], of whose axes the last `contract` are k; lhs_scale_inv?, rhs_scale_inv?
// f32 [], bias? [n...], c? [m..., n...] -> out [m..., n...], and a workspace u8 of any size. With `entry` of
// 0 or more out is [p, m..., n...], of which this entry is written: c, if it is there, is the others, best in
// the same buffer, and not added.
Status LaunchGemm(Stage stage, cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv,
                  Arg bias, Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune,
                  int64_t entry);

// The product of matrices lhs [m, k], rhs [n, k] with a scale for each block of 128 along k: lhs_scale_inv
// f32 [k/128, m], and rhs_scale_inv f32 [k/128, n] or rhs_block_inv f32 [n/128, k/128 up to a multiple of 4].
// With rhs_block_inv also of lhs [m..., k...], rhs [n..., k...], `outer` axes in front of the last one of k:
// of more axes than matrices, with any multiples of 16 as the last of k and n: lhs_scale_inv f32 [k.../128,
// m...], rhs_block_inv f32 [n.../128, k.../128], with blocks along the last axes of n and k.
Status LaunchGemmBlock(Stage stage, cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv,
                       Arg rhs_scale_inv, Arg rhs_block_inv, Arg bias, Arg c, Ret out, Ret workspace,
                       int64_t outer, bool tune);

// softmax(scale * q k^T + bias, masked) v per head. q [b, s, h, d], k [b, t, g, d], v [b, t, g, e]; or q and
// kv [b, t, 2, g, d]; or qkv [b, s, 3, h, d]; interleaved, kv and qkv lie as [b, t, g, 2, d], [b, s, h, 3,
// d]; seq_major, arrays lie as [s, b, ...]. bias? [b or 1, h or 1, s, t]; segments? i32 [b, n, 4]: the rows
// are full without; rng? u32 [b, h, 4], whose first words are seed and offset, i64 each -> out [b, s, h, e],
// lse f32 [b, h, s], natural logarithm, with segments [b, s, h] in that place; drawn: absent, the caller
// makes it; top? as lse, the largest logit of each query, and then lse is the sum of exp(logit - top), 0
// where there is none; a workspace u8.
Status LaunchAttentionFwd(Stage stage, cudaStream_t stream, Arg q, Arg k, Arg v, Arg kv, Arg qkv, Arg bias,
                          Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret top, Ret workspace,
                          int64_t left, int64_t right, bool bottom_right, bool seq_major, bool interleaved,
                          double scale, double dropout_rate);

// dout [b, s, h, e], the operands and results of the forward pass -> the gradients of what attends, each as
// its operand, and dbias? as bias, of q's type.
Status LaunchAttentionBwd(Stage stage, cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg kv, Arg qkv,
                          Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dq, Ret dk, Ret dv, Ret dkv,
                          Ret dqkv, Ret dbias, Ret workspace, int64_t left, int64_t right, bool bottom_right,
                          bool seq_major, bool interleaved, double scale, double dropout_rate,
                          bool deterministic);

// Attention on FP8 operands. q [b, s, h, d], k and v [b, t, g, d] E4M3, scales f32 [6]: fp8::OfBoth,
// fp8::OfForward -> out E4M3 [b, s, h, d], lse f32 [b, h, s], amax f32 [], a workspace u8.
Status LaunchAttentionFp8Fwd(Stage stage, cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out,
                             Ret lse, Ret amax, Ret workspace, bool causal, double scale);

// dout E4M3 or E5M2 [b, s, h, d], scales f32 [12]: fp8::OfBoth, fp8::OfBackward -> dq [b, s, h, d], dk and dv
// [b, t, g, d] of dout's type, four amaxes f32 [], a workspace u8.
Status LaunchAttentionFp8Bwd(Stage stage, cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out,
                             Arg lse, Arg scales, Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax,
                             Ret dv_amax, Ret dp_amax, Ret workspace, bool causal, double scale);

// Experts that the launchers of routers and of groups take; te_jax/ops/experts/router.py has it too.
inline constexpr int kMostExperts = 1024;

// The activation and its gradient over rows in groups, with a scale for each expert. x [r, a, f], r a
// multiple of 128; offsets i32 [e + 1], counts i32 [e]: groups as of LaunchGroup; bias: absent; scale? f32
// [e] or [1]
// -> y? [r, f], data? [r, f], data_t? [f, r], 0 in rows that pad a group, and nothing is written behind the
// last one; amax? f32 [e]; workspace u8: f32 [r/128, ceil(f / 64)] with amax.
Status LaunchActivationGroupedFwd(cudaStream_t stream, Arg x, Arg offsets, Arg counts, Arg bias, Arg scale,
                                  Ret y, Ret data, Ret data_t, Ret amax, Ret workspace, int64_t kind,
                                  double limit, double alpha, double glu_linear_offset);

// dy [r, f] and x -> dx? [r, a, f], data? [r, a, f], data_t? [a, f, r], amax? as above, dbias? f32 [e, a, f];
// workspace as above, and behind it f32 [r/128, a, f] with dbias.
Status LaunchActivationGroupedBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts, Arg bias,
                                  Arg scale, Ret dx, Ret data, Ret data_t, Ret amax, Ret dbias, Ret workspace,
                                  int64_t kind, double limit, double alpha, double glu_linear_offset);

// The experts of each token. logits f32 [m..., e], expert_bias? f32 [e] -> weights f32 [m..., topk], experts
// i32 [m..., topk], counts i32 [e]; counts_partials i32 [min(1024, max(1, ceil(m / 16))), e].
Status LaunchRouterFwd(cudaStream_t stream, Arg logits, Arg expert_bias, Ret weights, Ret experts, Ret counts,
                       Ret counts_partials, int64_t topk, bool sigmoid, bool scores_first, bool normalizes,
                       double scaling_factor, int64_t num_groups, int64_t group_topk);

// dweights f32 [m..., topk], logits f32 [m..., e], experts i32 [m..., topk] -> dlogits f32 [m..., e].
Status LaunchRouterBwd(cudaStream_t stream, Arg dweights, Arg logits, Arg experts, Ret dlogits, int64_t topk,
                       bool sigmoid, bool scores_first, bool normalizes, double scaling_factor,
                       int64_t num_groups, int64_t group_topk);

// Where each pair of a token and an expert lies in a buffer whose groups, the runs of one expert, begin at
// multiples of 128; pairs keep their order. experts i32 [m..., k] -> offsets i32 [num_experts + 1], the first
// row of each group, and the end; counts i32 [num_experts], pairs of each; rows i32 [m..., k], -1 of a pair
// whose expert is none of 0 to num_experts - 1; slots i32 [buffer], the pair of each row, -1 where there is
// none; workspace u8 [4 * num_experts * max(1, ceil(pairs / 2048))].
Status LaunchGroup(cudaStream_t stream, Arg experts, Ret offsets, Ret counts, Ret rows, Ret slots,
                   Ret workspace, int64_t num_experts, int64_t buffer);

// Rows of x in the order of the buffer, times their weights; zeros where a row pads, and nothing behind the
// last group. x [m..., h], slots i32 [r], offsets i32 [e + 1], weights? f32 [m..., topk], scale? f32 [] ->
// rows? [r, h], data? [r, h], data_t? [h, r], amax?; amax_partials? f32 [ceil(r / 256), ceil(h / 64)].
Status LaunchPermute(cudaStream_t stream, Arg x, Arg slots, Arg offsets, Arg weights, Arg scale, Ret rows,
                     Ret data, Ret data_t, Ret amax, Ret amax_partials, int64_t topk);

// Rows as of LaunchPermute, rounded to x's type and then quantized with a scale for each block of 128 ->
// data? [r, h], data_t? [h, r], scale_inv? f32 [h/128, r], scale_inv_t? f32 [r/128, h].
Status LaunchPermuteBlock(cudaStream_t stream, Arg x, Arg slots, Arg offsets, Arg weights, Ret data,
                          Ret data_t, Ret scale_inv, Ret scale_inv_t, int64_t topk, bool power_2,
                          double epsilon);

// As LaunchPermute and LaunchPermuteBlock, of x in E4M3 times scales? f32 [h/128, m...], a tensor in bf16.
// addresses? u32 [d, 2], without scales and weights: where x of each device is; tokens of all are numbered
// one device after the other.
Status LaunchPermuteFp8(cudaStream_t stream, Arg x, Arg scales, Arg slots, Arg offsets, Arg weights,
                        Arg addresses, Arg scale, Ret rows, Ret data, Ret data_t, Ret amax, Ret amax_partials,
                        int64_t topk);
Status LaunchPermuteFp8Block(cudaStream_t stream, Arg x, Arg scales, Arg slots, Arg offsets, Arg weights,
                             Arg addresses, Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t,
                             int64_t topk, bool power_2, double epsilon);

// The sum of each token's rows, times their weights. rows [r, h], positions i32 [m..., k], below 0 where
// there is no row, weights? f32 [m..., k] -> y [m..., h]. addresses? u32 [d, 2]: where rows of each device
// are; those of all are numbered one device after the other. The gradient: dy [m..., h], or in E4M3 and then
// times scales f32 [h/128, m...] with rows in bf16 -> dweights f32 [m..., k].
Status LaunchCombine(cudaStream_t stream, Arg rows, Arg positions, Arg weights, Arg addresses, Ret y);
Status LaunchCombineBwd(cudaStream_t stream, Arg dy, Arg rows, Arg positions, Arg scales, Ret dweights);

// Where an array is, for other devices: a -> the same array, in place, and address? u32 [2], its low word
// first. And y in place, once `after` is there: the array `kept` is not freed before.
Status LaunchAddress(cudaStream_t stream, Arg a, Ret same, Ret address);
Status LaunchKeep(cudaStream_t stream, Arg y, Arg kept, Arg after, Ret same);

// The activation and its gradient over rows in groups, rounded to x's type and then quantized with a scale
// for each block of 128. Operands as of LaunchActivationGrouped* -> data?, data_t? as there, scale_inv? f32
// [f/128, r] and [a, f/128, r], scale_inv_t? f32 [r/128, f] and [r/128, a, f], dbias? f32 [e, a, f];
// workspace u8: f32 [r/128, a, f] with dbias.
Status LaunchActivationGroupedBlockFwd(cudaStream_t stream, Arg x, Arg offsets, Arg counts, Arg bias,
                                       Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t, int64_t kind,
                                       double limit, double alpha, double glu_linear_offset, bool power_2,
                                       double epsilon);
Status LaunchActivationGroupedBlockBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts, Arg bias,
                                       Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t, Ret dbias,
                                       Ret workspace, int64_t kind, double limit, double alpha,
                                       double glu_linear_offset, bool power_2, double epsilon);

// The gradient of LaunchActivationGroupedBwd, of x bf16 or f16 [r, a, f/128, 128] without a bias, with a
// scale: its data and data_t in one array, by squares of 128 x 128 (te_jax/ops/experts/paired.py) -> paired
// as x, which it may be; amax? f32 [e]; workspace u8: f32 [r/128, f/128] with amax. e5m2: else E4M3.
Status LaunchActivationGroupedPairedBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts,
                                        Arg scale, Ret paired, Ret amax, Ret workspace, int64_t kind,
                                        double limit, double alpha, double glu_linear_offset, bool e5m2);

// Products of groups of rows with a scale for a tensor, an expert or a block of 128. offsets i32 [e + 1],
// counts i32 [e]: groups as of LaunchGroup. lhs [r, k], rhs [e, n, k]; lhs_scale_inv?, rhs_scale_inv? f32 [e]
// or [1]; or lhs_row_inv? f32 [k/128, r], rhs_block_inv? f32 [e, n/128, k/128]; bias? [e, n] -> out [r, n],
// zeros in rows that pad a group; nothing behind the last one. n and k may be several axes, with blocks along
// the last of them; outer: how many k has in front of that. The width of k is a multiple of 16 bytes, n one
// of 8, in blocks of their last axes. All grouped products: workspace u8 [kGroupedWorkspace], which
// te_jax/ops/gemm/grouped.py has too.
inline constexpr int64_t kGroupedWorkspace = 4;
Status LaunchGemmGrouped(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts, Arg lhs_scale_inv,
                         Arg rhs_scale_inv, Arg lhs_row_inv, Arg rhs_block_inv, Arg bias, Ret out,
                         Ret workspace, int64_t outer, bool fast_accum);

// The products that sum over each group. lhs [n, r], rhs [k, r], zeros in rows that pad a group; scales as
// above, or lhs_row_inv? f32 [r/128, n], rhs_row_inv? f32 [r/128, k]; c? [e, n, k], which out may be -> out
// [e, n, k]. k is a multiple of 8. With slots (0 or 1 axes) rhs is [a, k, r], of which the slot is read.
Status LaunchGemmGroupedWgrad(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts,
                              Arg lhs_scale_inv, Arg rhs_scale_inv, Arg lhs_row_inv, Arg rhs_row_inv, Arg c,
                              Ret out, Ret workspace, bool fast_accum, int64_t slots, int64_t slot);

// The two of a gradient in both layouts in one array [r, a, f/128, 128]. lhs, rhs f8 [e, n, b, f] -> out
// [r, n], of the b slots from `slot` on; lhs f8 [n, r], rhs, c? [e, n, f/128, 128], which out may be -> out
// as c, of the slot. e5m2: the type in the array, else E4M3.
Status LaunchGemmGroupedPaired(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts,
                               Arg lhs_scale_inv, Arg rhs_scale_inv, Ret out, Ret workspace, bool e5m2,
                               bool fast_accum, int64_t slot);
Status LaunchGemmGroupedPairedWgrad(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts,
                                    Arg lhs_scale_inv, Arg rhs_scale_inv, Arg c, Ret out, Ret workspace,
                                    bool e5m2, bool fast_accum, int64_t slot);

// The two of bf16 or f16 that lie across k. lhs [r, k], rhs [e, k, n]; bias? [e, n] -> out [r, n], as above.
// k and n are multiples of 8.
Status LaunchGemmGroupedWide(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts, Arg bias,
                             Ret out, Ret workspace);

// lhs [r, k], rhs [r, n], which may have anything in rows that pad a group; c? [e, k, n], which out may be ->
// out [e, k, n]. k and n are multiples of 8.
Status LaunchGemmGroupedWideWgrad(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts, Arg c,
                                  Ret out, Ret workspace);

}  // namespace te
#pragma GCC visibility pop
