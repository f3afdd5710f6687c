"""Arguments that aren't what a signature says: found before anything is done with them, and named.

Arguments of public functions are named with :func:`checked`, and their annotations are the check: what these say of an
argument is what an error says of it. Trees aren't looked into here (:mod:`ltx.tree` does that), and ranges are the
function's own.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, ParamSpec, TypeGuard, TypeVar, Union, cast

import torch

from ltx.core.base.errors import ArgumentError, InputError, Kind, StrategyError
from ltx.core.base.slips import hint
from ltx.core.base.slips import lacks as lacks
from ltx.core.base.tree import flatten

P = ParamSpec("P")
R = TypeVar("R")
Test = Callable[[Any], bool]

#: What JAX calls arguments of its functions, and what they are called here.
_JAX = {
    "axis": "dim",
    "axis_name": "axis",
    "scatter_dimension": "dim",
    "split_axis": "split_dim",
    "concat_axis": "concat_dim",
    "in_axes": "in_dims",
    "out_axes": "out_dims",
}

_NOT_GIVEN = object()
LARGEST = 2**63 - 1  # that a tensor holds
_ENDLESS_S = 86400.0 * 365 * 1000  # more than that is no duration; a timedelta can't hold much more


def checked(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function that raises :class:`ltx.errors.ArgumentError` for what the annotations of `names` don't allow.

    A whole number is an int that isn't a bool, of NumPy's too; a number is real. Other arguments the function checks
    itself. Graphs that are compiled hold no checks.

    >>> @checked("count")
    ... def first(items: list, count: int = 1) -> list:
    ...     return items[:count]
    >>> first([1, 2], count="2")
    Traceback (most recent call last):
        ...
    ltx.errors.ArgumentError: first: count must be int, got '2' of type str.
    """

    def mark(fn: Callable[P, R]) -> Callable[P, R]:
        inner = inspect.unwrap(fn)
        called = inner.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @functools.cache  # at the first call, since annotations may name what is defined later
        def tests() -> tuple[list[str], set[str], dict[str, tuple[Test, Any]], str]:
            """The arguments by position, those of JAX's names, what `names` must be, and how a call is written."""
            parameters = inspect.signature(inner).parameters
            places = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            found = {name: _test_of(parameters[name].annotation, inner.__globals__) for name in names}
            by_name = [f"{p.name}=" for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
            by_name += [f"**{p.name}" for p in parameters.values() if p.kind is p.VAR_KEYWORD]
            call = f"{called}({', '.join([*places, *by_name])})."
            of_jax = {name for name, here in _JAX.items() if here in places or f" {here}=" in call}
            wanted = {name: (test, parameters[name].annotation) for name, test in found.items() if test is not None}
            return places, of_jax, wanted, call

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                places, of_jax, wanted, call = tests()
                given = dict(zip(places, args, strict=False))
                for name in kwargs:
                    if name in given or (name in of_jax and name not in places):
                        what = "is given twice, by its place too" if name in places else "is no argument"
                        of = f" JAX's {name}= is {_JAX[name]}= here." if name in of_jax else ""
                        raise ArgumentError(f"{called}: {name}={brief(kwargs[name])} {what}.{of} Write {call}")
                    if "**" not in call and name not in places and f"{name}=" not in call and hint(name):
                        raise ArgumentError(f"{called}: {name}={brief(kwargs[name])} is no argument.{hint(name)}")
                for name, (test, kind) in wanted.items():
                    value = kwargs.get(name, given.get(name, _NOT_GIVEN))
                    if value is not _NOT_GIVEN and not test(value):
                        of = f" Write {call}" if isinstance(value, str) and name in given else ""
                        raise ArgumentError(f"{called}: {_says(name, kind, value)}{of}")
            return fn(*args, **kwargs)

        return wrapped

    return mark


def check_fields(value: Any, error: Kind, *names: str) -> None:
    """Raise `error` unless the fields `names` of a dataclass, or all, hold what their annotations allow."""
    if torch.compiler.is_compiling():
        return
    cls = type(value)
    for name, (test, annotation) in _field_tests(cast(Any, cls)).items():
        if (not names or name in names) and not test(found := getattr(value, name)):
            raise error(f"{cls.__name__}.{_says(name, annotation, found)}")


def follows(of: Callable[[Any], Any]) -> Any:
    """A field of what :class:`Offering` offers, whose default is what `of` gives of the value that offers."""
    return field(default=None, metadata={"follows": of})


class Offering(Generic[R]):
    """Base of a contract whose implementations say what they are in one frozen value, ``offers``.

    ``offers`` is a dataclass, `kind`, whose fields have defaults. A class says what differs by an attribute, a property
    or a method of a field's name, ``elementwise = True``, or by an `offers` of its own. Whatever way, `offers` has all
    of them, and each can be read by its name. `gone` are names of before, with what is written now: a class that has
    one, other than as a field of its own, is refused.
    """

    _kind: ClassVar[Any]
    _gone: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, kind: type | None = None, gone: Mapping[str, str] | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._kind, cls._gone = kind or cls._kind, cls._gone if gone is None else gone
        own, hints = set(vars(cls)), inspect.get_annotations(cls)
        for name in own & cls._gone.keys():
            if name not in hints or "ClassVar" in str(hints[name]):
                raise StrategyError(f"{cls.__name__}.{name} is gone: say it by {cls._gone[name]}.")
        for each in fields(cls._kind):
            of = each.metadata.get("follows")
            if kind is not None:
                setattr(cls, each.name, each.default if of is None else property(of))
            elif "offers" in own and each.name not in own:
                setattr(cls, each.name, property(attrgetter(f"offers.{each.name}")))
        said = [each.name for each in fields(cls._kind) if each.name in own]
        if said and "offers" not in own:
            cls.offers = property(  # type: ignore[assignment, method-assign]
                lambda self: replace(super(cls, self).offers, **{name: getattr(self, name) for name in said})  # type: ignore[misc]
            )

    @property
    def offers(self) -> R:
        follow = {f.name: of(self) for f in fields(self._kind) if (of := f.metadata.get("follows")) is not None}
        return cast(R, self._kind(**follow))

    def __getattr__(self, name: str) -> Any:  # type checkers don't see that `kind` has it
        if name in self._gone:
            raise AttributeError(f"{type(self).__name__}.{name} is gone: {self._gone[name]}.", name=name, obj=self)
        raise lacks(f"{type(self).__name__!r} object", name)


def whole(what: str, value: Any, least: int, error: Kind = InputError, most: int = LARGEST, besides: str = "") -> int:
    """What a user gave, called `what` in errors, as an int; NumPy's are ints too. `besides`: what else may be.

    Raises `error` for what is no whole number, or isn't from `least` to `most`.

    >>> whole("steps", 3, 1)
    3
    """
    if not is_whole(value) or not least <= value <= most:
        upper = f", and at most {most}" if most < 2**32 or (is_whole(value) and value > most) else ""
        raise error(f"{what} must be {besides}a whole number of at least {least}{upper}, got {brief(value)}.")
    return int(value)


def number(
    what: str,
    value: Any,
    least: float,
    error: Kind = InputError,
    more: bool = False,
    below: float = math.inf,
    besides: str = "",
) -> float:
    """What a user gave, called `what` in errors, as a finite number; NumPy's too. `besides`: as in :func:`whole`.

    Raises `error` for what is no number, or isn't at least `least` (with `more`: more than that) and less than `below`.

    >>> number("bandwidth", 1.5, 0, more=True)
    1.5
    """
    if not is_number(value) or not least <= value < below or (more and value == least):
        low, high = f"{'of more than' if more else 'of at least'} {least:g}", f", and less than {below:g}"
        raise error(f"{what} must be {besides}a finite number {low}{high * (below < math.inf)}, got {brief(value)}.")
    return value if type(value) in (int, float) else float(value)


def check_whole(owner: object, least: int, *names: str, most: int = LARGEST) -> None:
    """Raise unless the fields `names` of a hook or strategy are whole numbers from `least` to `most`."""
    for name in names:
        what = f"{type(owner).__name__}.{name}"
        object.__setattr__(owner, name, whole(what, getattr(owner, name), least, StrategyError, most))


def seconds(what: str, value: timedelta | float, error: Kind = InputError, zero: bool = False) -> float:
    """A duration in seconds: what a user gave, called `what` in errors, as a number of them or as a timedelta.

    Raises `error` for what isn't one, isn't finite, or isn't positive; `zero`: of no length is allowed.

    >>> seconds("timeout", timedelta(minutes=1)), seconds("timeout", 1.5)
    (60.0, 1.5)
    """
    length = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_number(length) or not 0 <= length < _ENDLESS_S or (length < 1e-6 and not zero):
        least = "at least 0" if zero else "more than 0"
        if is_number(length) and length >= _ENDLESS_S:
            least += " and less than 1,000 years"
        raise error(f"{what} must be a number of seconds or a datetime.timedelta, {least}, got {brief(value)}.")
    return float(length)


def check_number(owner: object, least: float, name: str, **limits: Any) -> None:
    """Raise unless field `name` of a hook or strategy is a number from `least` on; `limits` are :func:`number`'s."""
    what = f"{type(owner).__name__}.{name}"
    object.__setattr__(owner, name, number(what, getattr(owner, name), least, StrategyError, **limits))


@functools.lru_cache(maxsize=256)
def _field_tests(cls: Any) -> dict[str, tuple[Test, Any]]:
    found = {}
    for each in fields(cls):
        owner = next(base for base in cls.__mro__ if each.name in inspect.get_annotations(base))
        test = _test_of(each.type, vars(inspect.getmodule(owner) or types))
        if each.init and test is not None:
            found[each.name] = test, each.type
    return found


def _says(name: str, annotation: Any, value: Any) -> str:
    wanted = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    wanted = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or "), wanted)
    return f"{name} must be {wanted.replace(' | ', ' or ')}, got {shown(value)}."


def shown(value: Any) -> str:
    """A value and its type.

    >>> shown(["a"])
    "['a'] of type list"
    """
    return f"{brief(value)} of type {type(value).__name__}"


def outcome(value: Any) -> str:
    """What a user's function has returned, in a few words: "a tensor of shape [2] and torch.int8", "a tuple of 2"."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def name_of(function: Callable[..., Any]) -> str:
    """What the ``repr`` of a value calls a function that it was made of.

    >>> name_of(name_of), name_of(functools.partial(name_of, None))
    ('name_of', 'name_of')
    """
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", None) or brief(function)


def brief(value: Any, how: Callable[[Any], str] = repr) -> str:
    """The ``repr`` of a value where it has one that fits into a message; of tensors and states, what they are.

    >>> brief("a"), brief({"w": torch.ones(2, 2), "b": torch.ones(2)})
    ("'a'", '<dict of 2 leaves>')
    """
    try:
        text = how(value)
        if isinstance(value, torch.Tensor) and "\n" in text:
            return outcome(value)
        if "\n" in text or len(text) > 200:
            leaves, step = flatten(value)[0], getattr(value, "step", None)
            if any(isinstance(x, torch.Tensor) for x in leaves):
                many = f"{len(leaves)} lea{'ves' if len(leaves) > 1 else 'f'}"
                return f"<{type(value).__name__} of {many}{f' at step {step}' * is_whole(step)}>"
    except Exception:  # an object of the caller's that can't be shown, or a list of lists of lists ...
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-100:]}"


def _test_of(annotation: Any, names: dict[str, Any]) -> Test | None:
    """What tells values of an annotation from others; None where it allows everything, or can't be told."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, names)
        except NameError:  # a name for type checkers alone
            return None
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        found = [_test_of(part, names) for part in arguments]
        return None if None in found else lambda x: any(test(x) for test in found if test)
    if origin is Literal:
        return lambda x: isinstance(x, str) and x in arguments
    if (known := origin or annotation) in _TESTS:
        return _TESTS[known]
    if origin is not None and isinstance(origin, type):
        return _items_test(origin, arguments, names)
    return (lambda x: isinstance(x, annotation)) if isinstance(annotation, type) else None


def _items_test(origin: Any, arguments: tuple[Any, ...], names: dict[str, Any]) -> Test:
    items = [_test_of(each, names) for each in arguments] if issubclass(origin, collections.abc.Sequence) else []
    if origin is collections.abc.Iterable:
        return lambda x: isinstance(x, origin) and not (isinstance(x, torch.Tensor) and x.ndim == 0)
    if origin is tuple and ... not in arguments:
        return lambda x: (
            isinstance(x, tuple)
            and len(x) == len(items)
            and all(test is None or test(entry) for test, entry in zip(items, x, strict=True))
        )
    item = items[0] if items else None
    return lambda x: (
        isinstance(x, origin) and not isinstance(x, str | bytes) and (item is None or all(item(entry) for entry in x))
    )


def is_whole(x: Any) -> TypeGuard[int]:
    """Whether it is an int and no bool; NumPy's and symbolic ones are ints too."""
    return type(x) is int or (isinstance(x, numbers.Integral | torch.SymInt) and not isinstance(x, bool))


def is_number(x: Any) -> bool:
    """Whether it is a real number, and no bool."""
    return isinstance(x, numbers.Real | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)


_TESTS: dict[Any, Test | None] = {
    inspect.Parameter.empty: None,
    Any: None,
    object: None,
    None: lambda x: x is None,
    type(None): lambda x: x is None,
    bool: lambda x: isinstance(x, bool) or (type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")),
    int: is_whole,
    float: is_number,
    type: lambda x: isinstance(x, type),
    collections.abc.Callable: callable,
}
