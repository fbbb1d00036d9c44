"""What leaving the device costs, as measured: a copy to the host and back, or prefilling again."""

_KEEP = 0.8  # of the old average


class Costs:
    """Running averages of seconds per byte copied and per token prefilled."""

    def __init__(self):
        self._per_byte: float | None = None
        self._per_token: float | None = None

    def copied(self, nbytes: int, seconds: float) -> None:
        """Notes a copy between device and host."""
        if nbytes:
            self._per_byte = _average(self._per_byte, seconds / nbytes)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Notes a prefill."""
        if tokens:
            self._per_token = _average(self._per_token, seconds / tokens)

    def storing_pays(self, nbytes: int, tokens: int) -> bool:
        """Whether copying away and back is cheaper than prefilling; true until both were measured."""
        if self._per_byte is None or self._per_token is None:
            return True
        return 2 * nbytes * self._per_byte <= tokens * self._per_token


def _average(old: float | None, new: float) -> float:
    return new if old is None else _KEEP * old + (1 - _KEEP) * new
