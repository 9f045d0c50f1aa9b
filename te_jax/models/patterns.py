"""Fields that differ from layer to layer, as `ModelConfig.first` and `pattern` have them."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def pattern_of(types: Sequence[Hashable], fields: Mapping[Any, Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """`ModelConfig.pattern` of layers of these types: the shortest one. fields: of each type."""
    period = next(n for n in range(1, len(types) + 1) if types[n:] == types[:-n])
    return tuple(fields[name] for name in types[:period])


def share_keys(
    kinds: Sequence[Hashable], count: int, fields: Mapping[Any, Mapping[str, Any]], wide: Mapping[str, Any]
) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]:
    """`ModelConfig.first` and `pattern` of layers of these kinds, the last `count` of which take the keys and values of
    the last layer of their kind before them. fields: of each kind. wide: what layers that take have besides."""
    if not count:
        return (), pattern_of(kinds, fields)
    own, rest = kinds[:-count], kinds[-count:]
    gives = {kind: i for i, kind in enumerate(own)}
    first = [{**fields[kind], **(dict(kv_sharing="give") if gives[kind] == i else {})} for i, kind in enumerate(own)]
    without = lambda kind: {name: value for name, value in fields[kind].items() if name != "keys_as_values"}
    takes = {kind: without(kind) | dict(v_norm_eps=None, kv_sharing="take") | wide for kind in {*rest}}
    return tuple(first), pattern_of(rest, takes)
