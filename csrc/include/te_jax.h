/* The C interface of te_jax: its CUDA kernels without JAX. Link libte_jax.so; no CUDA header is needed.

   Each op is a struct of arguments and two functions, of which the first says how many bytes of workspace the
   second needs:

     te_jax_quantize_args q = {0};
     q.x = ..., q.scale = ..., q.data = ..., q.data_t = ..., q.amax = ..., q.split = 1;
     int64_t bytes;
     te_jax_quantize_workspace(&q, &bytes);
     q.workspace = (bytes of the device), q.workspace_bytes = bytes;
     if (te_jax_quantize(&q, stream) != TE_JAX_OK) puts(te_jax_error());

   Arrays are row-major, in memory of the current device, to which the stream (a cudaStream_t) belongs. An op
   enqueues its kernels and returns: it neither allocates nor waits. Results are final, and the same from run
   to run. `?` marks an array that may be absent: a struct of zeros, as are all others that an op has no use
   for; FP8 results need `scale`. `m...` is any number of axes. Arrays are aligned to 16 bytes, the matrices
   of products to 128 and a workspace to 256; one without axes to its element.

   Bad arguments, and what CUDA refuses, end as a status. Functions may be called from several threads;
   te_jax_error is the calling thread's. */
#ifndef TE_JAX_H_
#define TE_JAX_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TE_JAX_PUBLIC __attribute__((visibility("default")))
#else
#define TE_JAX_PUBLIC
#endif

#define TE_JAX_API_VERSION 3
#define TE_JAX_MAX_RANK 8

typedef enum te_jax_status {
  TE_JAX_OK = 0,
  TE_JAX_INVALID_ARGUMENT = 3, /* nothing was enqueued */
  TE_JAX_UNIMPLEMENTED = 12,   /* this GPU, or this cuBLASLt, lacks it */
  TE_JAX_INTERNAL = 13         /* an error of CUDA, or a library that cannot be loaded */
} te_jax_status;

typedef enum te_jax_type {
  TE_JAX_NONE = 0, /* there is no such array */
  TE_JAX_I32 = 4,
  TE_JAX_F16 = 10,
  TE_JAX_F32 = 11,
  TE_JAX_BF16 = 16,
  TE_JAX_E5M2 = 19,
  TE_JAX_E4M3 = 20
} te_jax_type;

typedef struct te_jax_array {
  void* data;
  int32_t type; /* a te_jax_type */
  int32_t rank;
  int64_t shape[TE_JAX_MAX_RANK];
} te_jax_array;

/* The version of this header that the library is built with. */
TE_JAX_PUBLIC int te_jax_api_version(void);

/* Why the last call of this thread that failed did so. Valid until the thread's next call. */
TE_JAX_PUBLIC const char* te_jax_error(void);

/* Where a library is that products need: "libcublasLt.so.13", or .12 in a build for CUDA 12. One that the
   process has loaded comes first; without a path, the system is asked. An error once the library was looked
   for. */
TE_JAX_PUBLIC te_jax_status te_jax_set_library_path(const char* soname, const char* path);

#define TE_JAX_OP(op)                                                                                  \
  TE_JAX_PUBLIC te_jax_status te_jax_##op##_workspace(const te_jax_##op##_args* args, int64_t* bytes); \
  TE_JAX_PUBLIC te_jax_status te_jax_##op(const te_jax_##op##_args* args, void* stream)

/* To FP8 with one scale. x [m..., n...], whose first `split` axes are m; scale? f32 [] -> data? [m..., n...],
   data_t? [n..., m...] E4M3 or E5M2: x * scale, saturated; amax? f32 []: max |x|; dbias? f32 [n...]: the sum
   of x over m; scale_inv? f32 []: 1 / scale, as products take it. */
typedef struct te_jax_quantize_args {
  te_jax_array x, scale;
  te_jax_array data, data_t, amax, dbias, scale_inv;
  int64_t split;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_quantize_args;
TE_JAX_OP(quantize);

/* To FP8 with a scale for each block of 128, which kernels of ..._block do only on Hopper (9.0). x [m..., p,
   n..., q], where m are the first `lead` axes -> data? as x, data_t? [n..., q, m..., p]; of blocks 1 x 128
   scale_inv? f32 [n..., q/128, m..., p], scale_inv_t? f32 [m..., p/128, n..., q]; of blocks 128 x 128
   (square) block_inv? f32 [m..., p/128, n..., q/128], block_inv_t? f32 [n..., q/128, m..., p/128]; dbias? f32
   [n..., q]. Numbers of blocks are rounded up. A scale is fp8_max / max(amax of the block, epsilon), rounded
   down to a power of 2 with power_2. */
typedef struct te_jax_quantize_block_args {
  te_jax_array x;
  te_jax_array data, data_t, scale_inv, scale_inv_t, block_inv, block_inv_t, dbias;
  int64_t lead;
  int32_t square, power_2;
  double epsilon;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_quantize_block_args;
TE_JAX_OP(quantize_block);

/* What `kind` is in the activations: of the first slot of x. A second slot is a factor, as it is; with
   clamped SiLU it is clamped to +-limit, plus glu_linear_offset, and the first is min(x, limit) *
   sigmoid(alpha
   * min(x, limit)). Others do not read the three. */
enum {
  TE_JAX_GELU = 0, /* by tanh */
  TE_JAX_SILU = 1,
  TE_JAX_RELU = 2,
  TE_JAX_QUICK_GELU = 3,
  TE_JAX_SQUARED_RELU = 4,
  TE_JAX_CLAMPED_SILU = 5
};

/* x [m..., a, f], of a = 1 or 2 slots; scale? f32 [] -> y? [m..., f] of x's type; data? [m..., f], data_t?
   [f, m...]: y * scale in FP8; amax? f32 []: max |y|; scale_inv? f32 []: 1 / scale. */
typedef struct te_jax_activation_fwd_args {
  te_jax_array x, scale;
  te_jax_array y, data, data_t, amax, scale_inv;
  int64_t kind;
  double limit, alpha, glu_linear_offset;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_activation_fwd_args;
TE_JAX_OP(activation_fwd);

/* Its gradient. dy [m..., f] of x's type, x and scale? as above -> dx? [m..., a, f] of x's type; data?
   [m..., a, f], data_t? [a, f, m...]; amax? f32 []: max |dx|; dbias? f32 [a, f]: the sum of dx over m;
   scale_inv? as above. */
typedef struct te_jax_activation_bwd_args {
  te_jax_array dy, x, scale;
  te_jax_array dx, data, data_t, amax, dbias, scale_inv;
  int64_t kind;
  double limit, alpha, glu_linear_offset;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_activation_bwd_args;
TE_JAX_OP(activation_bwd);

/* The two with a scale for each block of 1 x 128, of y or dx rounded to x's type. x [m..., p, a, f] -> data?,
   data_t? as above; scale_inv? f32 [f/128, m..., p], scale_inv_t? f32 [m..., p/128, f]. */
typedef struct te_jax_activation_block_fwd_args {
  te_jax_array x;
  te_jax_array data, data_t, scale_inv, scale_inv_t;
  int64_t kind;
  double limit, alpha, glu_linear_offset;
  int32_t power_2;
  double epsilon;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_activation_block_fwd_args;
TE_JAX_OP(activation_block_fwd);

/* dy [m..., p, f] of x's type, x [m..., p, a, f] -> data?, data_t? as above; scale_inv? f32 [a, f/128, m...,
   p], scale_inv_t? f32 [m..., p/128, a, f]; dbias? f32 [a, f]. */
typedef struct te_jax_activation_block_bwd_args {
  te_jax_array dy, x;
  te_jax_array data, data_t, scale_inv, scale_inv_t, dbias;
  int64_t kind;
  double limit, alpha, glu_linear_offset;
  int32_t power_2;
  double epsilon;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_activation_block_bwd_args;
TE_JAX_OP(activation_block_bwd);

/* LayerNorm, or with `rms` RMSNorm, over the last axis. x [..., h], gamma [h], beta? [h], known_mean?,
   known_rstd? f32 [...]: mean (not of RMSNorm) and rstd as an earlier call found them, which are no results
   then; scale? f32 [] -> y? [..., h] of x's type; data? [..., h], data_t? [h, ...]: y * scale in FP8; mean?
   f32 [...], rstd? f32 [...]: 1 / sqrt(var + eps); amax? f32 []: max |y|; scale_inv? f32 []: 1 / scale.
   zero_centered: gamma + 1 is applied. */
typedef struct te_jax_norm_fwd_args {
  te_jax_array x, gamma, beta, known_mean, known_rstd, scale;
  te_jax_array y, data, data_t, mean, rstd, amax, scale_inv;
  double eps;
  int32_t rms, zero_centered;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_norm_fwd_args;
TE_JAX_OP(norm_fwd);

/* The same to FP8 with a scale for each block of 1 x 128, of y rounded to x's type. x [m..., p, h] -> data?
   as x, data_t? [h, m..., p], scale_inv? f32 [h/128, m..., p], scale_inv_t? f32 [m..., p/128, h], mean?,
   rstd. */
typedef struct te_jax_norm_block_fwd_args {
  te_jax_array x, gamma, beta;
  te_jax_array data, data_t, scale_inv, scale_inv_t, mean, rstd;
  double eps;
  int32_t rms, zero_centered, power_2;
  double epsilon;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_norm_block_fwd_args;
TE_JAX_OP(norm_block_fwd);

/* The gradient of norm_fwd. dy, x, dres? [..., h] of one type, mean? (of LayerNorm) and rstd f32 [...], gamma
   [h]
   -> dx [..., h], with dres added before its rounding; dgamma, dbeta? (of LayerNorm) [h] of gamma's type. */
typedef struct te_jax_norm_bwd_args {
  te_jax_array dy, x, mean, rstd, gamma, dres;
  te_jax_array dx, dgamma, dbeta;
  int32_t rms, zero_centered;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_norm_bwd_args;
TE_JAX_OP(norm_bwd);

/* lhs [m..., k...], rhs [n..., k...], of whose axes the last `contract` are k; for FP8 operands
   lhs_scale_inv?, rhs_scale_inv? f32 []; bias? [n...], c? [m..., n...] of out's type (an f32 result of FP8
   takes a bf16 bias) -> out [m..., n...]: lhs rhs^T times the scales, plus bias, plus c; out may be c. FP8
   operands need products of n... and of k... that are multiples of 16, and give f32, bf16 or f16, others
   their own type or f32. The first product of its sizes and types asks cuBLASLt for a plan, which the process
   keeps; with `tune` it times some, and waits for the stream. While the stream is captured there must be one.
 */
typedef struct te_jax_gemm_args {
  te_jax_array lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c;
  te_jax_array out;
  int64_t contract;
  int32_t fast_accum, tune;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_gemm_args;
TE_JAX_OP(gemm);

/* The product of FP8 matrices lhs [m, k], rhs [n, k] with scales of blocks, as quantize_block writes them:
   lhs_scale_inv f32 [k/128, m]; rhs_scale_inv? f32 [k/128, n], or rhs_block_inv? f32 [n/128, k/128 up to a
   multiple of 4]. k is a multiple of 128, m of 4, n of 16. Or rhs [a, n, k], such as the weights of a gated
   activation, whose blocks begin anew in each, and rhs_block_inv f32 [a, n/128, k/128], n/128 and k/128
   rounded up: k and n are any multiples of 16 -> out [m, a, n], bias [a, n], c [m, a, n]. */
typedef struct te_jax_gemm_block_args {
  te_jax_array lhs, rhs, lhs_scale_inv, rhs_scale_inv, rhs_block_inv, bias, c;
  te_jax_array out;
  int32_t tune;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_gemm_block_args;
TE_JAX_OP(gemm_block);

/* Products of the rows of groups with the weight of their group (an expert), on Hopper. Group g has counts[g]
   rows from row offsets[g] on, a multiple of 128; offsets i32 [e + 1], of which the last is the end, counts
   i32 [e]. lhs [r, k], rhs [e, n, k]; for FP8 operands lhs_scale_inv?, rhs_scale_inv? f32 [e] or [1], or of
   blocks of 128 lhs_row_inv? f32 [k/128, r] and rhs_block_inv? f32 [e, n/128, k/128]; bias? [e, n] of out's
   type -> out [r, n], zeros in rows that pad a group, and nothing behind the last one. r is a multiple of
   128, n of 8, the bytes of k of 16. n and k may be several axes, of which the last are such multiples, and
   only along these there are blocks, n/128 and k/128 rounded up. */
typedef struct te_jax_gemm_grouped_args {
  te_jax_array lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, lhs_row_inv, rhs_block_inv, bias;
  te_jax_array out;
  int32_t fast_accum;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_gemm_grouped_args;
TE_JAX_OP(gemm_grouped);

/* The products that sum over each group. lhs [n, r], rhs [k, r], zeros in rows that pad a group; scales as
   above, or lhs_row_inv? f32 [r/128, n] and rhs_row_inv? f32 [r/128, k]; c? [e, n, k] of out's type, which
   out may be -> out [e, n, k], plus c. k is a multiple of 8. */
typedef struct te_jax_gemm_grouped_wgrad_args {
  te_jax_array lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, lhs_row_inv, rhs_row_inv, c;
  te_jax_array out;
  int32_t fast_accum;
  void* workspace;
  int64_t workspace_bytes;
} te_jax_gemm_grouped_wgrad_args;
TE_JAX_OP(gemm_grouped_wgrad);

/* Makes the plan of a product of gemm or gemm_block, and launches nothing: before its stream is captured.
 * Pointers are not read. */
TE_JAX_PUBLIC te_jax_status te_jax_gemm_plan(const te_jax_gemm_args* args, void* stream);
TE_JAX_PUBLIC te_jax_status te_jax_gemm_block_plan(const te_jax_gemm_block_args* args, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TE_JAX_H_ */
