"""What the trainer can refuse or fail to do."""


class TrainingError(Exception):
    """A call was refused or failed; nothing of it was applied.

    `reason` is the name of an `opentinker.v1.ErrorReason` without its prefix, such as "NOT_FOUND". `field`,
    `datum_index`, `expected`, `actual` and `limit` are as in `opentinker.v1.ErrorInfo`.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        datum_index: int | None = None,
        field: str = "",
        expected: int | None = None,
        actual: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.datum_index = datum_index
        self.field = field
        self.expected = expected
        self.actual = actual
        self.limit = limit


class NonFiniteGradient(TrainingError):
    """The accumulated gradient holds NaN or infinity: the optimizer step was refused.

    Weights, moments and step are as before; the gradient is dropped, so that training can go on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="NON_FINITE")
