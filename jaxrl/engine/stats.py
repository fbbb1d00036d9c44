"""What an engine counts."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Totals since start. Tokens, dispatches, seconds."""

    prompt_tokens: int = 0  # asked to be appended by requests
    prefilled_tokens: int = 0  # run through the model by prefill
    recomputed_tokens: int = 0  # of those, computed before and dropped meanwhile
    shared_tokens: int = 0  # taken over from a prefix that another request had made
    recovered_tokens: int = 0  # of those, computed before by the session itself and dropped meanwhile
    sampled_tokens: int = 0
    prefill_dispatches: int = 0
    decode_dispatches: int = 0
    preemptions: int = 0  # requests that had to give way in the middle
    device_seconds: float = 0.0  # from the start of a job to its end on the device thread
    idle_seconds: float = 0.0  # between jobs while requests were there: what the host costs
