"""Save and restore a run with orbax."""

import contextlib
import hashlib
import json
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from . import cluster, config
from .steps import TrainState

# What orbax logs with a traceback, it raises as well; and what it raises is said below in a line.
for _logger in ("absl", "asyncio"):
    logging.getLogger(_logger).addFilter(lambda record: not record.exc_info)


def _said_already(kind, error, trace, say=sys.excepthook) -> None:
    """`sys.excepthook` without what tensorstore's threads print of the other writes when one has failed."""
    if not (kind is RuntimeError and str(error) == "Event loop is closed"):
        say(kind, error, trace)


sys.excepthook = _said_already

DAMAGED = "damaged-"  # before the step in the name of a checkpoint that was moved aside


class Checkpoints:
    """The last two checkpoints of one run. One holds three items: `state` (parameters, optimizer, step, rng),
    `fp8` (absent in bf16) and `run`, a JSON dict that the caller chooses and that must have a `key`: two runs
    with different keys are not the same run. To it are added the `step`, `has_fp8`, `sums` with a checksum of each
    array, and `sha256` of all of the dict: what a run goes on from is covered by one of them.
    """

    def __init__(self, directory: pathlib.Path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            create=True,
            cleanup_tmp_directories=True,  # of a run that was killed; the lock says that no other one is writing
            # Made in threads, a directory that cannot be made would leave others waiting for it, for 20 minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self.directory = directory
        with self._writing():
            self.manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, state: TrainState, run: dict) -> None:
        """Copies state and run, then writes them while training goes on.

        Raises OSError where this checkpoint, or the one before, cannot be written.
        """
        arrays = {"state": _without_fp8(state)} | ({"fp8": state.fp8} if state.fp8 else {})
        run = run | {"step": int(state.step), "has_fp8": bool(state.fp8), "sums": checksums(arrays)}
        run = sealed(run)  # a copy: orbax reads it later, and by then the caller may have added losses
        items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
        with self._writing():
            written = self.manager.save(int(state.step), args=ocp.args.Composite(**items, run=ocp.args.JsonSave(run)))
            if written is False:
                raise ValueError(f"orbax declines step {int(state.step)} next to {saved_steps(self.directory)}")

    def restore(self, fresh: TrainState, key: dict) -> tuple[TrainState, dict] | None:
        """The (state, run) of the last checkpoint that is whole, or None if there is none. `fresh` gives shapes, dtypes
        and shardings.

        Damaged ones after it are moved aside. A checkpoint without FP8 state (one of a bf16 run) gets `fresh`'s.
        ValueError if its key is not `key`, or none is whole.
        """

        def read(path):
            run = read_run(path)
            if config.differing(run["key"], key):
                return {}, run
            wanted = {"state": _without_fp8(fresh)} | ({"fp8": fresh.fp8} if fresh.fp8 and run["has_fp8"] else {})
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
            reader = ocp.StandardCheckpointHandler()
            restore = lambda name, tree: reader.restore(path / name, args=ocp.args.StandardRestore(tree))
            return {name: restore(name, tree) for name, tree in shapes.items()}, run

        found = newest(self.directory, read)
        if found is None:
            return None
        items, run, damaged = found
        where = f"the checkpoint in {self.directory}"
        config.check_same(where, run["key"], key, "give the same arguments, or another --out")
        self._move_aside(damaged)
        if fresh.fp8 and not run["has_fp8"]:
            print(f"note: {where} has no FP8 state; it starts afresh (scales of 1)")
        return TrainState(**items["state"], fp8=items.get("fp8", fresh.fp8)), run

    def _move_aside(self, damaged: list[int]) -> None:
        """So that these steps can be saved again, and count no more among the two that are kept."""
        if not damaged:
            return
        if cluster.is_first():
            for step in damaged:
                names = [f"{DAMAGED}{step}"] + [f"{DAMAGED}{step}-{n}" for n in range(2, 100)]
                aside = next(path for name in names if not (path := self.directory / name).exists())
                (self.directory / str(step)).rename(aside)
                print(f"note: the damaged one of step {step} is {aside} now")
        cluster.wait_for_all("damaged checkpoints are moved aside")
        self.manager.reload()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise errors of many classes
            raise OSError(f"a checkpoint in {self.directory} could not be written: {brief(error)}") from error

    def close(self) -> None:
        """Waits until all is written. Raises OSError where it cannot be."""
        with self._writing():
            self.manager.wait_until_finished()
            self.manager.close()


@contextlib.contextmanager
def opened(directory: pathlib.Path) -> Iterator[Checkpoints]:
    """`Checkpoints`, closed at the end. A checkpoint that is being written when the block raises is still finished."""
    checkpoints = Checkpoints(directory)
    try:
        yield checkpoints
    except BaseException:
        if jax.process_count() == 1:  # the processes finish a checkpoint together, and others may be gone
            with contextlib.suppress(OSError):
                checkpoints.close()
        raise
    checkpoints.close()


def saved_steps(directory: pathlib.Path) -> list[int]:
    """The steps of checkpoints whose writing came to its end: orbax gives one its name then."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())


SEAL = "sha256"  # of the other entries of `run`


def sealed(run: dict) -> dict:
    """A copy of `run` in JSON's types, with its checksum, whatever checksum it has."""
    text = json.dumps({name: value for name, value in run.items() if name != SEAL}, sort_keys=True)
    return json.loads(text) | {SEAL: hashlib.sha256(text.encode()).hexdigest()}


def read_run(path: pathlib.Path) -> dict:
    """`run` of the checkpoint `path`. ValueError where it is not as it was saved, or has no checksum."""
    run = ocp.JsonCheckpointHandler().restore(path / "run", args=ocp.args.JsonRestore())
    if not isinstance(run, dict) or SEAL not in run:
        raise ValueError(
            f"its record has no {SEAL}, as where an earlier version of the program wrote it: go on with that version, "
            "or train anew"
        )
    if sealed(run)[SEAL] != run[SEAL]:
        raise ValueError("its record of the run is not as it was saved")
    if str(run["step"]) != path.name:
        raise ValueError(f"its record is of step {run['step']}")
    return run


def newest(directory: pathlib.Path, read: Callable) -> tuple[dict, dict, list[int]] | None:
    """(items, run, steps of damaged checkpoints after it) of the last whole checkpoint; None where there is none.

    read: path -> (items, run), on each process; what it raises says how a checkpoint is damaged.
    Each damaged one is told. ValueError where there are checkpoints, and none is whole.
    """
    damaged = {}
    for step in reversed(saved_steps(directory)):
        path, items, run, why = directory.absolute() / str(step), {}, {}, None
        try:
            items, run = read(path)
        except Exception as error:  # orbax and tensorstore raise errors of many classes
            why = brief(error)
        # A process that could not read its part must not be alone in going back.
        if not cluster.all_agree(why is None):
            damaged[step] = why or "another process could not read it"
        elif wrong := _differing_sums(items, run["sums"]):
            damaged[step] = f"{len(wrong)} arrays are not as they were saved, the first is {wrong[0]}"
        else:
            for bad, why in damaged.items():
                print(f"note: the checkpoint {directory / str(bad)} is damaged ({why}): step {step}'s is taken")
            return items, run, list(damaged)
    if damaged:
        reasons = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise ValueError(f"no checkpoint in {directory} can be read ({reasons}): give another one")
    return None


def read_weights(path: pathlib.Path, params, fp8: dict, experts: dict) -> dict:
    """{"state": {"params": ..., "experts": ...}, "fp8": ...} of a checkpoint, which must hold all; the optimizer's
    state is not read.

    Only shapes and dtypes of the arguments count (`jax.eval_shape` gives them). {} for fp8 and experts reads none.
    """
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {"params": params} | ({"experts": experts} if experts else {})
    wanted = {"state": state} | ({"fp8": fp8} if fp8 else {})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), wanted)
    reader = ocp.PyTreeCheckpointHandler()
    return {
        name: reader.restore(
            path / name,
            args=ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
            ),
        )
        for name, tree in shapes.items()
    }


def checksums(items: Any) -> dict[str, int]:
    """A number for each array of a tree, by its path; the same on any mesh, another if a bit of one element differs."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {jax.tree_util.keystr(path): int(n) for (path, _), n in zip(leaves, _sums([x for _, x in leaves]))}


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    def sum_of(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            place = place * size + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        # An odd factor has an inverse modulo 2**32, so a change of one element cannot vanish.
        return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)

    return [sum_of(x) for x in arrays]


def _differing_sums(items: dict, saved: dict[str, int]) -> list[str]:
    """Names of arrays whose checksum is not in `saved`."""
    return [name for name, n in checksums(items).items() if saved.get(name) != n]


def brief(error: BaseException) -> str:
    """The root of an error as a part of a sentence."""
    while error.__cause__:
        error = error.__cause__
    text = " ".join(str(error).split()) or repr(error)
    if "No space left on device" in text:
        return "no space left on device"
    return f"{type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


def _without_fp8(state: TrainState) -> dict:
    """Nor an empty field, which a state of an earlier version has not."""
    return {k: v for k, v in state._asdict().items() if k != "fp8" and (k != "experts" or v)}
