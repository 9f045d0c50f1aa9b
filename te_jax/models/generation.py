"""Text generation, token by token, with a KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from te_jax.core.arrays import as_jax, known_values
from te_jax.core.check import (
    ARRAY,
    FUNCTION,
    INTEGERS,
    NONE,
    RANDOM_KEY,
    Kind,
    KnownFields,
    check,
    integer,
    number,
    warn_once,
)
from te_jax.core.loops import plain_loops
from te_jax.flax.cache import COLLECTION
from te_jax.models.causal import CausalLM
from te_jax.models.encoder import EncoderDecoder
from te_jax.models.stack import VARIABLES, Model


@dataclass(frozen=True)
class Sampling(KnownFields):
    """How the next token is chosen.

    temperature: divides the logits; 0 takes the likeliest token, whatever the other fields say.
    top_k:       among the k likeliest tokens, and others as likely as the last of them; None: all.
    top_p:       among the likeliest tokens whose probabilities, after temperature and top_k, add up to p, the one that
                 reaches it included (https://arxiv.org/abs/1904.09751); None: all.

    Raises TypeError and ValueError for fields out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check("Sampling", "temperature", self.temperature, number(least=0))
        check("Sampling", "top_k", self.top_k, NONE | integer(1))
        check("Sampling", "top_p", self.top_p, NONE | number(above=0, most=1))

    def choose(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        """A token for each row of logits f32[b, V]: i32[b]. key: of `jax.random`; None if greedy."""
        if self.temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        # A temperature near 0 would make several logits infinite, and one that f32 does not hold -inf NaN.
        temperature = min(max(self.temperature, _TINY), _HUGE)
        logits = (logits - jnp.max(logits, -1, keepdims=True)) / temperature
        if self.top_k is not None:
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            logits = self._nucleus(logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    def _nucleus(self, logits):
        ordered = -jnp.sort(-logits, axis=-1)
        shares = jax.nn.softmax(ordered, -1)
        kept = jnp.cumsum(shares, -1) - shares < self.top_p  # the likelier tokens by themselves do not reach p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
        return jnp.where(logits < least, -jnp.inf, logits)


_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
GREEDY = Sampling(temperature=0)
_INTEGER_SCALAR = Kind("an integer scalar", lambda value: INTEGERS.is_type(value) and value.ndim == 0)
_SAMPLING = Kind("a te_jax.models.Sampling", lambda value: isinstance(value, Sampling))
_WRITER = Kind("a CausalLM or an EncoderDecoder", lambda model: isinstance(model, CausalLM | EncoderDecoder))
_GENERATE_ARGUMENTS = {
    "model": _WRITER,
    "variables": VARIABLES,
    "prompts": INTEGERS,
    "lengths": NONE | INTEGERS,
    "count": integer(1),
    "sampling": _SAMPLING,
    "key": NONE | RANDOM_KEY,
    "input_lengths": NONE | INTEGERS,
}

_DECODER = Kind("a Linen module that decodes, such as a CausalLM", lambda model: isinstance(model, nn.Module))
_READ_ARGUMENTS = {
    "model": _DECODER,
    **{name: _GENERATE_ARGUMENTS[name] for name in ("variables", "prompts")},
    "lengths": INTEGERS,
    "slots": integer(1),
}
_READ = Kind(
    "the pair (logits, cache) of read_prompts or of write_tokens",
    lambda state: isinstance(state, tuple) and len(state) == 2 and ARRAY.accepts(state[0]) and state[0].ndim == 2,
)
_CHOICE = Kind("a function (key, logits) -> tokens, such as Sampling().choose or GREEDY.choose", FUNCTION.is_type)
_WRITE_ARGUMENTS = {
    "model": _DECODER,
    **{name: _GENERATE_ARGUMENTS[name] for name in ("variables", "key")},
    "lengths": INTEGERS,
    "state": _READ,
    "count": integer(0),
    "choose": _CHOICE,
}


def _check_lengths(name: str, lengths: jax.Array, shape: tuple[int, ...]) -> None:
    if lengths.shape != shape:
        raise ValueError(f"{name}: lengths has the shape {lengths.shape}; pass {shape}, a length of each prompt.")


def read_prompts(
    model: nn.Module, variables: Any, prompts: jax.Array, lengths: jax.Array, slots: int, **context: Any
) -> tuple[jax.Array, Any]:
    """(logits f32[b, V] of the token after each prompt, the cache).

    model: a `CausalLM`, an `EncoderDecoder` or a Linen module that is called as they are. prompts: int[b, s], padded on
    the right. lengths: int[b]. slots: of the cache, for prompts and what follows them. context: more arguments of the
    model's call.

    Raises ValueError for a cache with tokens among `variables`: the prompts would be read as if they came after those,
    and for lengths of another shape; TypeError for arguments that are not of their kind.
    What pads prompts is not read; the logits of a prompt with a number that is no token are NaN.
    """
    name = "te_jax.models.read_prompts"
    given = dict(model=model, variables=variables, prompts=prompts, lengths=lengths, slots=slots)
    for argument, kind in _READ_ARGUMENTS.items():
        check(name, argument, given[argument], kind)
    _check_lengths(name, lengths, prompts.shape[:1])
    if _has_tokens(variables.get(COLLECTION, {})):
        raise ValueError(
            f"te_jax.models: variables hold {COLLECTION!r}, with tokens that would count as read before the prompts; "
            "leave it out: this call makes one."
        )
    prompts = _looked_up(prompts)
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    options = dict(lengths=lengths, positions=positions, at=lengths - 1, decode=True, max_decode_length=slots)
    return model.apply(variables, prompts, **options, **context, mutable=["cache"])


def _looked_up(tokens):
    """The tokens; for what is below 0, which a look-up would take from the table's end, a number that no table has a
    row for, so that it is NaN."""
    if jnp.issubdtype(tokens.dtype, jnp.unsignedinteger):
        return tokens
    if jnp.iinfo(tokens.dtype).bits < 32:
        tokens = tokens.astype(jnp.int32)
    return jnp.where(tokens < 0, jnp.iinfo(tokens.dtype).max, tokens)


def _check_prompts(name, prompts, lengths, vocab):
    """Raises ValueError for tokens out of the vocabulary. prompts: i64[b, s] of numpy. lengths: likewise [b], or
    None."""
    is_read = True if lengths is None else np.arange(prompts.shape[1]) < lengths[:, None]
    for row, at in np.argwhere(((prompts < 0) | (prompts >= vocab)) & is_read)[:1].tolist():
        raise ValueError(
            f"{name}: prompts[{row}, {at}] is {prompts[row, at]}; pass tokens from 0 to {vocab - 1}, and lengths where "
            "prompts are padded."
        )


def _has_tokens(cache) -> bool:
    """Whether it is known that tokens were written to a cache."""
    leaves = jax.tree.leaves_with_path(cache)
    counts = [known_values(leaf) for path, leaf in leaves if jax.tree_util.keystr(path).endswith("['cache_index']")]
    return any(count is not None and count.any() for count in counts)


def write_tokens(
    model: nn.Module,
    variables: Any,
    state: Any,
    lengths: jax.Array,
    key: jax.Array | None,
    *,
    count: int,
    choose: Callable[..., jax.Array],
    stop_at: int | None = None,
    **context: Any,
) -> tuple[jax.Array, Any]:
    """(i32[b, count], state): the tokens that follow, from the result of `read_prompts`; the state goes on from there.

    choose: (key, logits f32[b, V]) -> i32[b]. key: of `jax.random`, or None where `choose` wants none. stop_at: a token
    behind which a row has nothing but it; None: there is none. context: as of `read_prompts`. A row whose logits are
    NaN, as where the cache has no slot left, has the token -1 from there on.

    Raises TypeError for a state that is no such result and for arguments that are not of their kind, ValueError for
    lengths of other rows.
    """
    name = "te_jax.models.write_tokens"
    given = dict(model=model, variables=variables, state=state, lengths=lengths, key=key, count=count, choose=choose)
    for argument, kind in _WRITE_ARGUMENTS.items():
        check(name, argument, given[argument], kind)
    _check_lengths(name, lengths, state[0].shape[:1])

    def step(carry, i):
        (logits, cache), over = carry
        token = _next(choose, key, i, logits, over, stop_at)
        over = over if stop_at is None else over | (token == stop_at)
        positions = (lengths + i)[:, None]
        options = dict(positions=positions, decode=True, at=jnp.zeros_like(token), mutable=["cache"])
        read = _looked_up(token)[:, None]
        return (model.apply({**variables, **cache}, read, **options, **context), over), token

    loop = plain_loops(lambda *start: jax.lax.scan(step, start, jnp.arange(count)))
    (state, _), tokens = loop(state, jnp.zeros(lengths.shape, bool))
    return tokens.T, state


def _next(choose, key, i, logits, over, stop_at):
    """Token i of each row; `stop_at` for rows that are over (bool[b]). A row whose logits are NaN has -1: argmax would
    give token 0."""
    token = choose(None if key is None else jax.random.fold_in(key, i), logits)
    token = jnp.where(jnp.any(jnp.isnan(logits), -1), -1, token)
    return token if stop_at is None else jnp.where(over, stop_at, token)


def generate(
    model: Model,
    variables: Any,
    prompts: jax.Array,
    count: int,
    *,
    lengths: jax.Array | None = None,
    sampling: Sampling = GREEDY,
    key: jax.Array | None = None,
    stop_at: int | None = None,
    encoded: jax.Array | None = None,
    input_lengths: jax.Array | None = None,
) -> jax.Array:
    """`count` tokens after each prompt: i32[b, count]. Call it under `jax.jit`, and in the autocast of the model. A
    model without scan is faster: see `te_jax.models.unscan`.

    model:    a `CausalLM` or an `EncoderDecoder`.
    prompts:  int[b, s], padded on the right; what pads them may be any number. Under `jax.jit` tokens out of the
              vocabulary are not seen; logits are NaN then, and all that follows is -1.
    lengths:  int[b], from 1 to s; None: the prompts have no padding.
    sampling: greedy, or what `key` of `jax.random` draws from.
    stop_at:  the end-of-text token; the rest of the row is filled with it.
    encoded, input_lengths: of an `EncoderDecoder`, whose prompts are what its decoder begins with.

    Raises TypeError for another model and for prompts and lengths that are no integers, ValueError for prompts that are
    not [b, s], for a sampling that wants a key and gets none, for more tokens than there are learned positions, for
    lengths and tokens that are known and out of range, and for a stop_at that is known and out of the vocabulary.
    """
    name = "te_jax.models.generate"
    listed = lambda a: np.asarray(a) if isinstance(a, list | tuple) else a
    lengths, input_lengths = listed(lengths), listed(input_lengths)
    known_prompts, known_lengths = known_values(prompts), known_values(lengths)  # `as_jax` within a jit makes tracers
    prompts, lengths, input_lengths = as_jax(prompts, lengths, input_lengths)
    given = dict(locals())
    for argument, kind in _GENERATE_ARGUMENTS.items():
        check(name, argument, given[argument], kind)
    token = integer(0, model.config.vocab_size - 1)
    check(name, "stop_at", stop_at, NONE | token | _INTEGER_SCALAR)
    if (known := known_values(stop_at)) is not None:
        check(name, "stop_at", int(known), token)
    if encoded is None and input_lengths is not None:
        raise ValueError(f"{name}: input_lengths is given without encoded, which it is of; pass both, or neither.")
    if prompts.ndim != 2 or prompts.shape[1] == 0:
        raise ValueError(f"{name}: prompts has the shape {prompts.shape}; pass [b, s], s at least 1.")
    if key is None and sampling.temperature:
        raise ValueError(f"{name}: key is None, but {sampling} draws tokens; pass jax.random.key(seed), or GREEDY.")
    if key is not None and sampling is GREEDY:  # the default; a temperature of 0 may be one that varies
        warn_once(name, f"key is given, but {sampling} draws no tokens; pass sampling=Sampling(), or leave it out.")
    b, s = prompts.shape
    limit = model.config.max_positions
    if limit is not None and s + count > limit:
        raise ValueError(
            f"{name}: {s} + {count} tokens, but there are {limit} learned positions; pass a smaller count."
        )
    if lengths is not None:
        _check_lengths(name, lengths, (b,))
    if known_lengths is not None and ((known_lengths < 1) | (known_lengths > s)).any():
        raise ValueError(
            f"{name}: lengths are {known_lengths.tolist()}, of prompts of {s} tokens; pass lengths from 1 to {s}."
        )
    if known_prompts is not None and (lengths is None or known_lengths is not None):
        _check_prompts(name, known_prompts, known_lengths, model.config.vocab_size)
    lengths = jnp.full((b,), s, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    context = {} if encoded is None else dict(encoded=encoded, input_lengths=input_lengths)
    state = read_prompts(model, variables, prompts, lengths, s + count, **context)
    options = dict(count=count - 1, choose=sampling.choose, stop_at=stop_at, **context)
    tokens, (logits, _) = write_tokens(model, variables, state, lengths, key, **options)
    over = None if stop_at is None else jnp.any(tokens == stop_at, 1)
    # The model need not read the last token.
    last = _next(sampling.choose, key, count - 1, logits, over, stop_at)
    return jnp.concatenate([tokens, last[:, None]], 1)
