"""The engine's one kind of error."""


class EngineError(RuntimeError):
    """The engine could not serve a request; the message says why and what to do."""
