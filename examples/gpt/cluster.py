"""The processes of a run and their devices: to be settled before jax is used."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


def start(args) -> None:
    """--deterministic, --devices, and --coordinator with --processes and --process-id. Raises ValueError where they do
    not fit."""
    if args.deterministic:  # read when jax is first used
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    if args.devices is not None:
        jax.config.update("jax_num_cpu_devices", args.devices)
    numbers = {"--processes": args.processes, "--process-id": args.process_id}
    given = [flag for flag, value in numbers.items() if value is not None]
    if args.coordinator in (None, "auto") and given:
        raise ValueError(
            f"{given[0]} is given without --coordinator HOST:PORT, the address of process 0: give that too"
        )
    if args.coordinator == "auto":
        jax.distributed.initialize()  # asks Slurm, Open MPI and others
    elif args.coordinator is not None:
        if len(given) < len(numbers):
            raise ValueError("--coordinator HOST:PORT needs --processes N and --process-id I (0 to N - 1)")
        if not 0 <= args.process_id < args.processes:
            raise ValueError(
                f"--process-id is {args.process_id}, --processes {args.processes}: give 0 to {args.processes - 1}"
            )
        jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    if args.devices is not None and jax.default_backend() != "cpu":
        raise ValueError(
            f"--devices {args.devices} makes devices of a CPU, but this is a {jax.default_backend()}: leave it out, or "
            "set JAX_PLATFORMS=cpu"
        )


def is_first() -> bool:
    """Whether this is the process that prints and writes for all."""
    return jax.process_index() == 0


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
    """stdout of the other processes goes nowhere; their errors still go to stderr."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def wait_for_all(what: str) -> None:
    """Returns once all processes have called it with the same `what`."""
    if several():
        multihost_utils.sync_global_devices(what)


def all_agree(fine: bool) -> bool:
    """Whether `fine` is true in all processes, each of which calls this."""
    return bool(largest(int(not fine)) == 0)


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def largest(number: int) -> int:
    """The largest `number` of all processes, each of which calls this."""
    return int(multihost_utils.process_allgather(np.array(number, np.int32)).max()) if several() else number


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """All processes get to its end, or none gets beyond: a ValueError or OSError in one is an error in all, instead of
    a wait without end for the one that left."""
    failed = None
    try:
        yield
    except (OSError, ValueError) as error:
        failed = error
    fine = all_agree(failed is None)
    if failed:
        raise failed
    if not fine:
        raise ValueError("another process cannot go on: see what it says")


def leave(main: Callable[[], int]) -> None:
    """Ends the process with the exit code of `main`; where that is not 0, without a wait for threads (of orbax) or
    processes that may wait for this one."""
    try:
        code = main()
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, jax.errors.JaxRuntimeError) and several():
            print("a collective fails where another process of the run has ended: see what it says", file=sys.stderr)
        code = 1
    if code == 0:
        sys.exit()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
