"""The owner's end of a socket to the keeper, when that is closed under its callers."""

import asyncio
import gc
import socket
from typing import Any

import pytest

from sandbox.base import SandboxError
from sandbox.keeper.channel import Channel

LARGE = bytes(8 << 20)  # more than a socket takes at once


async def closed_while_sending(*, cancelled: bool) -> list[dict[str, Any]]:
    """Two calls, the first amid its payload and the second behind it; what the loop complains of."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    calls = [asyncio.ensure_future(channel.call({"op": "x"}, payload=LARGE)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(call.done() for call in calls)
    if cancelled:
        calls[1].cancel()
    channel.close("the keeper was closed")
    theirs.close()
    said = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(said[0], SandboxError) and isinstance(
        said[1], asyncio.CancelledError if cancelled else SandboxError
    )
    del calls, said
    gc.collect()
    await asyncio.sleep(0)
    return complaints


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_close_leaves_no_unheard_exception(cancelled: bool) -> None:
    assert asyncio.run(asyncio.wait_for(closed_while_sending(cancelled=cancelled), 20)) == []
