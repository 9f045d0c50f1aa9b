"""XLA flags for several GPUs."""

# The flags are described at https://docs.jax.dev/en/latest/gpu_performance_tips.html
_XLA_FLAGS = {
    # Collectives are started early and awaited late, so that they run while kernels do. Without it most of them wait.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # In a loop, such as `nn.scan` over layers, collectives run across steps: while one layer computes, the weights of
    # the next are gathered (FSDP), and the gradients of the last are scattered (FSDP) or summed (data parallelism).
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    # Two steps of such a loop become one: values that a step hands to the next are not copied, and XLA has more
    # kernels to overlap collectives with.
    "xla_gpu_enable_while_loop_double_buffering": "true",
    # Collectives of up to this size together become one. The weights of a layer fit (218M in an 8B model, one byte
    # each in FP8): few large messages use the links better than many small ones. Memory for the results limits it.
    "xla_gpu_all_gather_combine_threshold_bytes": str(256 * 2**20),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(256 * 2**20),
    "xla_gpu_all_reduce_combine_threshold_bytes": str(256 * 2**20),
}


def recommended_xla_flags() -> str:
    """Flags that let XLA overlap collectives with kernels on several NVIDIA GPUs, "--name=value --name=value".

    te_jax sets no environment variables itself. Put the flags into XLA_FLAGS before the first use of jax:

        export XLA_FLAGS="$(python -c '
        from te_jax import sharding
        print(sharding.recommended_xla_flags())')"

    They turn on the latency-hiding scheduler, the pipelining of collectives in loops and the double buffering of loops,
    and set the sizes up to which collectives are combined. Windowed einsum
    (`xla_gpu_threshold_for_windowed_einsum_mib`) is not among them: it splits XLA's own dots, and te_gemm is none. XLA
    aborts at a flag that it does not know; jaxlib 0.10.2 and 0.12.0 know all of these.
    """
    return " ".join(f"--{name}={value}" for name, value in _XLA_FLAGS.items())
