"""Settings of what a run works with: devices, engine, sandboxes and graders. See `jaxrl.options`."""

from typing import Annotated, Literal

from pydantic import Field

from jaxrl.section import Count, Positive, Section, Whole


class Mesh(Section):
    """Devices that weights and rows are spread over: their product is their number; all 1: one device."""

    data: Count = 1
    """Splits rows; every part has whole weights."""
    fsdp: Count = 1
    """Splits rows, and weights by the model's width."""
    tensor: Count = 1
    """Splits heads, MLP widths and the vocabulary."""
    expert: Count = 1
    """Splits experts."""


class Engine(Section):
    """Fixed shapes of the inference engine."""

    slots: Count = 128
    """Sessions decoded together."""
    context: Count = 192
    """Most tokens of a session."""
    prefill_rows: Count = 16
    """Sessions prefilled together."""
    prefill_buckets: Annotated[tuple[Count, ...], Field(min_length=1)] = (16, 64)
    """Tokens of a prefill piece, ascending; the last one cuts long prompts."""
    decode_steps: Count = 4
    """Tokens sampled per dispatch."""
    page_size: Count = 32
    """Tokens whose keys and values lie together."""
    cache_bytes: Count | None = None
    """Device memory for keys, values and recurrent states; unset: room for every slot."""
    parked: Count = 16
    """Spare rows of recurrent state, for prompts that a group shares and for sessions whose tool runs."""
    host_bytes: Whole = 4 * 2**30
    """Host memory for idle sessions that had to leave the device."""
    eviction: Literal["offload", "recompute", "measured"] = "offload"
    """They are copied to the host while it has room, or prefilled again, or what was measured as cheaper."""


class Sandbox(Section):
    """Where the agent's commands run, and the limits of each sandbox."""

    backend: Literal["namespace", "docker", "apptainer"] = "namespace"
    """Isolation. Only the rows of r2e_gym can have another than namespace."""
    concurrency: Count = 128
    """Episodes at once, each with a sandbox of its own."""
    cpu: Positive = 1.0
    """Cores."""
    memory_mib: Count = 512
    """Memory, MiB."""
    disk_mib: Count = 64
    """Written files, MiB."""
    pids: Count = 64
    """Processes."""
    wall_seconds: Positive = 1800.0
    """Life of a sandbox, seconds."""


class Grader(Section):
    """Who runs the hidden tests."""

    workers: Count = 2
    """Grading processes."""
