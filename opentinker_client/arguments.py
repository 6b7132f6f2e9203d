"""Arguments that are accepted have an effect; unknown ones are refused, naming the nearest that exists."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


def unknown_argument(where: str, name: str, known: Iterable[str]) -> TypeError:
    """The refusal of an argument."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(known)}"
    return TypeError(f"{where} got an unknown argument {name!r}{hint}")


def checked(function: F) -> F:
    """Refuses unknown keyword arguments with a hint."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(f"{function.__name__}()", name, known)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


@dataclass_transform(frozen_default=True)
def record(cls: type[C]) -> type[C]:
    """A frozen dataclass whose constructor refuses unknown arguments with a hint."""
    made = dataclass(frozen=True)(cls)
    original = made.__init__
    known = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(f"{cls.__name__}()", name, known)
        original(self, *args, **kwargs)

    made.__init__ = __init__  # type: ignore[method-assign]
    return made


def with_async_names(*, results: Iterable[str] = (), futures: Iterable[str] = ()) -> Callable[[type[C]], type[C]]:
    """Adds `<name>_async` for the named methods, which return futures.

    Awaiting one of `results` gives the result itself; awaiting one of `futures` gives the future as soon as the call is
    on its way, as Tinker's training calls do.
    """

    def add(cls: type[C]) -> type[C]:
        for name, awaits_result in [*((n, True) for n in results), *((n, False) for n in futures)]:
            setattr(cls, f"{name}_async", _async_twin(getattr(cls, name), awaits_result=awaits_result))
        return cls

    return add


def _async_twin(method: Callable[..., Any], *, awaits_result: bool) -> Callable[..., Any]:
    async def twin(self: Any, *args: Any, **kwargs: Any) -> Any:
        future = method(self, *args, **kwargs)
        return await future if awaits_result else future

    twin.__name__ = f"{method.__name__}_async"
    twin.__doc__ = f"As `{method.__name__}`, awaited."
    return twin
