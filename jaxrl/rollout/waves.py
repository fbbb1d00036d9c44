"""Dynamic sampling (DAPO, arXiv:2503.14476): further tasks are drawn for groups that teach nothing."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jaxrl.contracts import TrajectoryGroup


async def waves(
    play: Callable[[int], AsyncGenerator[TrajectoryGroup, None]],
    *,
    wanted: int,
    rounds: int,
    mixed: Callable[[TrajectoryGroup], bool],
) -> AsyncGenerator[TrajectoryGroup, None]:
    """Yields groups until `wanted` of them are mixed, or `rounds` further waves did not suffice.

    A wave draws as many tasks as mixed groups are missing, and ends before the next begins. So what is drawn
    depends on the groups alone, never on the order in which they finish; and no mixed group is left over.

    Args:
        play: draws that many tasks and yields their groups in task order.
        mixed: whether a group has rewards to compare.
    """
    missing = wanted
    for _ in range(1 + rounds):
        if not missing:
            return
        async with aclosing(play(missing)) as groups:
            async for group in groups:
                missing -= mixed(group)
                yield group
