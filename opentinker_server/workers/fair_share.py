"""Start-time fair queueing (Goyal, Vin, Cheng 1996) over time on one thread."""

from collections.abc import Mapping, Sequence


class FairShare:
    """Divides a thread's time among names in proportion to their weights, whenever several have work.

    Each name has a virtual time, the seconds it was charged over its weight; the least goes next. A name that had
    no work for a while goes on from the present virtual time, so that idleness earns no credit. When nobody has
    work the differences are settled: nobody was kept waiting.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """weights: positive, by name; 1 for a name that is not there."""
        self._weights = dict(weights or {})
        self._virtual: dict[str, float] = {}
        self._had_work: frozenset[str] = frozenset()
        self._clock = 0.0

    def pick(self, ready: Sequence[str]) -> str:
        """Which of `ready`, the names that have work now, goes next; the first one on a tie."""
        return self.order(ready)[0]

    def order(self, ready: Sequence[str]) -> list[str]:
        """`ready` in the order of their turns, for work that may take several along."""
        for name in ready:
            if name not in self._had_work:
                self._virtual[name] = max(self._virtual.get(name, 0.0), self._clock)
        self._had_work = frozenset(ready)
        order = sorted(ready, key=lambda name: self._virtual[name])
        self._clock = max(self._clock, self._virtual[order[0]])
        return order

    def charge(self, name: str, seconds: float) -> None:
        """Accounts for time that a picked name used."""
        self._virtual[name] += seconds / self._weights.get(name, 1.0)

    def rest(self) -> None:
        """Says that no name has work now."""
        self._clock = max(self._virtual.values(), default=self._clock)
        self._had_work = frozenset()

    def forget(self, name: str) -> None:
        """Drops a name that does not come back."""
        self._virtual.pop(name, None)
        self._had_work -= {name}
