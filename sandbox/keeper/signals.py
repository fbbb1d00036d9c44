"""Signals as programs expect them: a background job or nohup hands ignored ones down to all it starts."""

import signal

CATCHABLE = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def restore_defaults() -> None:
    """In a forked process, before it becomes another program: none of ours stays ignored."""
    for number in CATCHABLE:
        signal.signal(number, signal.SIG_DFL)
