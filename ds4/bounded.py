"""Caches of pure results, bounded by what their entries cost. They change the time, never a result."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")


class BoundedCache(Generic[K, V]):
    """Keeps what was used lately, at most `max_cost` in all. Thread-safe.

    Entries live in two generations. New and used ones are in the young one; when that holds half of `max_cost` it
    becomes the old one, and the old one is forgotten. So a hit in the young generation changes nothing and takes no
    lock, which a list in order of use would.
    """

    def __init__(self, max_cost: int) -> None:
        self._half = max_cost // 2
        self._young: dict[K, tuple[V, int]] = {}
        self._old: dict[K, tuple[V, int]] = {}
        self._cost = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    @property
    def cost(self) -> int:
        """Of everything that is kept."""
        with self._lock:
            return sum(cost for _, cost in {**self._old, **self._young}.values())

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is not None:
            return found[0]
        found = self._old.get(key)
        if found is None:
            return None
        self.put(key, *found)
        return found[0]

    def put(self, key: K, value: V, cost: int) -> None:
        """An entry that costs more than half of all is not kept."""
        if cost > self._half:
            return
        with self._lock:
            before = self._young.get(key)
            self._cost += cost - (0 if before is None else before[1])
            if self._cost > self._half:
                self._young.pop(key, None)
                self._old, self._young, self._cost = self._young, {}, cost
            self._young[key] = (value, cost)

    def discard(self, key: K) -> None:
        with self._lock:
            self._old.pop(key, None)
            found = self._young.pop(key, None)
            if found is not None:
                self._cost -= found[1]


def remembered(max_cost: int, cost: Callable[..., int]) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """Decorates a pure function of hashable positional arguments; `cost` of its arguments stands for both sides."""

    def decorate(function: Callable[P, V]) -> Callable[P, V]:
        cache: BoundedCache[tuple[object, ...], V] = BoundedCache(max_cost)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> V:
            if kwargs:
                raise TypeError(f"{function.__name__} takes positional arguments only")
            found = cache.get(args)
            if found is None:
                found = function(*args, **kwargs)
                cache.put(args, found, cost(*args, **kwargs))
            return found

        return call

    return decorate


def once_per_object(max_cost: int, cost: Callable[..., int]) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """Decorates a pure function of positional arguments that never change, which are told apart by which objects they
    are: nothing is hashed or compared, however long it is. Equal arguments that are other objects are computed anew.

    `cost` of the arguments stands for both sides.
    """

    def decorate(function: Callable[P, V]) -> Callable[P, V]:
        # The arguments are kept beside the result: while they live no other object has their identity.
        cache: BoundedCache[tuple[int, ...], tuple[object, V]] = BoundedCache(max_cost)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> V:
            if kwargs:
                raise TypeError(f"{function.__name__} takes positional arguments only")
            key = tuple(map(id, args))
            found = cache.get(key)
            if found is None:
                found = args, function(*args, **kwargs)
                cache.put(key, found, cost(*args))
            return found[1]

        return call

    return decorate
