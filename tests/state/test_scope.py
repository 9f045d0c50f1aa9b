"""Whose an autocast or a MeshResource is: tasks, threads, generators, exceptions; and what `enabled` may be."""

import asyncio
import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import te_jax as te
import te_jax.flax as te_flax
from te_jax import sharding
from te_jax.recipe import DelayedScaling, Float8CurrentScaling
from te_jax.state import fp8

RECIPE, OTHER = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
OUT = "around the call itself.*never around an `await` or a `yield`"
SCOPES = {
    "autocast": (lambda: te.autocast(True, RECIPE), fp8.current_recipe),
    "mesh": (lambda: sharding.global_shard_guard(te.MeshResource("dp")), sharding.current_mesh_resource),
}
scopes = pytest.mark.parametrize("scope, current", SCOPES.values(), ids=SCOPES)


@pytest.fixture(autouse=True)
def nothing_stays_in_force():
    yield
    assert fp8.current_recipe() is None and sharding.current_mesh_resource() is None


@scopes
def test_two_tasks_that_wait_inside(scope, current):
    async def request(delay):
        with scope():
            await asyncio.sleep(delay)
            assert current() is not None

    async def both():
        return await asyncio.gather(request(0.001), request(0.002), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None and isinstance(second, RuntimeError)
    with pytest.raises(RuntimeError, match=OUT):
        raise second


@scopes
def test_a_task_beside_one_that_waits_inside(scope, current):
    """What it traces would be under the other's; what it enters around a call of its own is its own."""

    async def waits():
        with scope():
            await asyncio.sleep(0.001)

    async def traces():
        with pytest.raises(RuntimeError, match=OUT):
            jax.jit(lambda x: (current(), x)[1])(1.0)
        with pytest.raises(RuntimeError, match=OUT):
            scope().__enter__()
        await asyncio.sleep(0.002)
        assert current() is None
        with scope():
            assert current() is not None

    async def both():
        await asyncio.gather(waits(), traces())

    asyncio.run(both())


@scopes
def test_started_inside_of_a_block(scope, current):
    async def call():
        return current()

    async def run():
        with scope():
            assert await asyncio.create_task(call()) is not None  # the block is in force where it waits
            late = asyncio.create_task(call())
        with pytest.raises(RuntimeError, match="started inside of a block that is not in force.*" + OUT):
            await late
        with scope():
            with pytest.raises(RuntimeError, match="started inside"):
                await asyncio.to_thread(current)
            assert current() is not None

    asyncio.run(run())


def test_a_thread_enters_its_own():
    """A pool's threads have no autocast of their caller; they take the recipe along."""

    def work(recipe):
        with te.autocast(recipe=recipe):
            return fp8.current_recipe()

    with ThreadPoolExecutor(2) as pool, te.autocast(recipe=RECIPE):
        assert list(pool.map(work, [RECIPE, OTHER])) == [RECIPE, OTHER]
        assert pool.submit(fp8.current_recipe).result() is None
        assert fp8.current_recipe() == RECIPE


@scopes
def test_generators_that_are_left_out_of_order(scope, current):
    def batches():
        with scope():
            yield 1

    generator = batches()
    next(generator)
    with scope():
        with pytest.raises(RuntimeError, match=OUT):
            next(generator)
        assert current() is not None  # that of this block
    assert current() is None

    one, other = batches(), batches()
    next(one), next(other)
    one.close()  # an exception ends it, which says more than the order
    assert current() is not None
    other.close()


def test_async_generators():
    async def batches():
        with te.autocast(recipe=RECIPE):
            for i in range(2):
                yield i

    async def consume():
        async for _ in batches():
            await asyncio.sleep(0)
        assert fp8.current_recipe() is None
        left = batches()
        await anext(left)
        await asyncio.create_task(left.aclose())  # in another task, as where it is collected
        with te.autocast(recipe=OTHER):  # entered around the call it is clear what is meant
            assert fp8.current_recipe() == OTHER

    asyncio.run(consume())


def test_exit_stacks_and_exceptions():
    with contextlib.ExitStack() as stack:
        stack.enter_context(te.autocast(recipe=RECIPE))
        stack.enter_context(te.autocast(False))
        assert fp8.current_recipe() is None and fp8.is_switched_off()
        kept = stack.pop_all()
        assert fp8.is_switched_off()
        kept.close()
        assert not fp8.is_switched_off()
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=RECIPE), te.autocast(recipe=OTHER):
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="dp_resource"), jax.set_mesh(jax.make_mesh((1,), ("x",))):
        with te.autocast(True, RECIPE, te.MeshResource(dp_resource="nowhere")):
            pass
    assert fp8.current_recipe() is None


def test_left_in_another_thread():
    block = te.autocast(recipe=RECIPE)
    block.__enter__()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=OUT):
        pool.submit(block.__exit__, None, None, None).result()
    with te.autocast(recipe=OTHER):
        assert fp8.current_recipe() == OTHER
    assert fp8._recipe._user_context.value is None


class TestEnabled:
    def test_a_recipe_alone_means_on(self):
        for options, want in [
            (dict(recipe=RECIPE), RECIPE),
            (dict(enabled=None, recipe=OTHER), OTHER),
            (dict(enabled=np.True_), DelayedScaling()),
            (dict(enabled=np.False_, recipe=RECIPE), None),
            (dict(enabled=False, recipe=RECIPE), None),
            (dict(mesh_resource=te.MeshResource()), None),
        ]:
            with te.autocast(**options):
                assert fp8.current_recipe() == want
                assert fp8.is_switched_off() == ("enabled" in options and want is None)
        with te.fp8_autocast(fp8_recipe=RECIPE):
            assert fp8.current_recipe() == RECIPE
        with te.fp8_autocast(False, RECIPE, te.MeshResource("dp")):
            assert fp8.current_recipe() is None and sharding.current_mesh_resource() == te.MeshResource("dp")
        with te.fp8_autocast(True, RECIPE, sharding_resource=te.MeshResource("dp")):
            assert sharding.current_mesh_resource() == te.MeshResource("dp")

    @pytest.mark.parametrize("enabled", [RECIPE, DelayedScaling, "off", "True", 1, 0, jnp.ones(()), np.ones(2, bool)])
    def test_enabled_is_a_bool(self, enabled):
        hint = r"autocast\(recipe=...\)" if enabled is RECIPE or enabled is DelayedScaling else ""
        for entry in (te.autocast, te.fp8_autocast):
            with pytest.raises(TypeError, match=f"autocast: enabled is .*; pass True or False.*{hint}"):
                entry(enabled, RECIPE)

    def test_decorates_functions(self):
        block = te.autocast(recipe=RECIPE)
        asks = block(lambda depth: (fp8.current_recipe(), depth and asks(depth - 1)))
        assert asks(1) == (RECIPE, (RECIPE, 0)) and fp8.current_recipe() is None
        for _ in range(2):
            with block, block:
                assert fp8.current_recipe() == RECIPE

        async def coroutine(): ...

        def generator():
            yield

        async def both():
            yield

        for f in (coroutine, generator, both):
            with pytest.raises(TypeError, match=f"{f.__name__}, whose body runs after.*around a call"):
                block(f)

    def test_nothing_given_is_told(self):
        with pytest.warns(UserWarning, match="FP8 stays off; pass True, a recipe, or False"):
            block = te.autocast()
        with block:
            assert fp8.current_recipe() is None and not fp8.is_switched_off()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            te.autocast(False), te.autocast(mesh_resource=te.MeshResource())


def test_a_warning_as_an_error_leaves_the_block():
    """Of a pattern that names no module."""
    recipe = DelayedScaling(exclude=("lm_hed",))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="lm_hed"):
            with te.autocast(recipe=recipe):
                nn.Sequential([te_flax.DenseGeneral(4)]).init(jax.random.key(0), jnp.ones((2, 4)))
    assert te.fp8.current_recipe() is None


def test_a_decorated_function_in_many_threads():
    inside = te.autocast(recipe=DelayedScaling())(te.fp8.current_recipe)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: inside() == DelayedScaling(), range(2000)))
    assert te.fp8.current_recipe() is None
