"""Save and restore a run with orbax."""

import copy
import pathlib

import jax
import orbax.checkpoint as ocp

from .steps import TrainState


class Checkpoints:
    """The last two checkpoints of one run. One holds three items: `state` (parameters, optimizer, step, rng),
    `fp8` (absent in bf16) and `run`, a JSON dict that the caller chooses and that must have a `key`: two runs
    with different keys are not the same run.
    """

    def __init__(self, directory: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self.manager = ocp.CheckpointManager(directory.absolute(), options=options)
        self.directory = directory

    def save(self, state: TrainState, run: dict) -> None:
        """Copies state and run, then writes them while training goes on."""
        run = copy.deepcopy(run)  # orbax reads it later, and by then the caller may have added losses
        items = {
            "state": ocp.args.StandardSave(_without_fp8(state)),
            "run": ocp.args.JsonSave({**run, "has_fp8": bool(state.fp8)}),
        }
        if state.fp8:
            items["fp8"] = ocp.args.StandardSave(state.fp8)
        self.manager.save(int(state.step), args=ocp.args.Composite(**items))

    def restore(self, fresh: TrainState, key: dict) -> tuple[TrainState, dict] | None:
        """The last checkpoint's (state, run), or None if there is none. `fresh` gives shapes and dtypes.

        A checkpoint without FP8 state (one of a bf16 run) gets `fresh`'s. ValueError if its key is not `key`.
        """
        run = self.last_run()
        if run is None:
            return None
        differing = [f"{k} {run['key'].get(k)} there, {key.get(k)} now" for k in key if run["key"].get(k) != key[k]]
        if differing:
            raise ValueError(
                f"the checkpoint in {self.directory} is of another run ({'; '.join(differing)}): "
                "give the same arguments, or another --out"
            )
        wanted = {"state": _without_fp8(fresh)}
        if fresh.fp8 and run["has_fp8"]:
            wanted["fp8"] = fresh.fp8
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
        restored = self.manager.restore(self.manager.latest_step(), args=ocp.args.Composite(**items))
        if fresh.fp8 and not run["has_fp8"]:
            print(f"note: the checkpoint in {self.directory} has no FP8 state; it starts afresh (scales of 1)")
        return TrainState(**restored["state"], fp8=restored["fp8"] if "fp8" in wanted else fresh.fp8), run

    def last_run(self) -> dict | None:
        """`run` of the last checkpoint; None if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return None
        return self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def restore_weights(self, params, fp8: dict) -> tuple[dict, dict]:
        """(params, fp8) of the last checkpoint, which must hold both; the optimizer's state is not read.

        Of the arguments shapes and dtypes count (`jax.eval_shape` gives them). {} for fp8 reads none.
        """
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {"state": {"params": params}} | ({"fp8": fp8} if fp8 else {})
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), wanted)
        items = {
            name: ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
            )
            for name, tree in shapes.items()
        }
        restored = self.manager.restore(self.manager.latest_step(), args=ocp.args.Composite(**items))
        return restored["state"]["params"], restored["fp8"] if fp8 else {}

    def close(self) -> None:
        """Waits until all is written."""
        self.manager.wait_until_finished()
        self.manager.close()


def _without_fp8(state: TrainState) -> dict:
    return {k: v for k, v in state._asdict().items() if k != "fp8"}
