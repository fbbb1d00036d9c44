"""Groups of rollouts for the trainer: in task order, generated some steps ahead, none trained too old.

With weights of version v at the start of a step, the step trains only tokens sampled by versions
v - max_staleness to v. Generation may run `Bound.steps` whole steps ahead of the step that is being
trained; it moves on when new weights are in use. So no group can get too old while every step makes at most
`updates_per_step` versions. Each group is checked all the same when it is handed out: one that is too old
(or was sampled by weights that a resumed run no longer has) is generated anew, from the same sample keys.

Groups are trained in task order, not in order of completion: tasks whose episodes are short would otherwise
be trained before the others, and which step trains a task would depend on timing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from jaxtyping import Int32

from jaxrl.contracts import TrajectoryGroup
from jaxrl.rollout.cursor import Ticket

type Play = Callable[[Ticket], Coroutine[Any, Any, TrajectoryGroup]]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far generation may run ahead of training. A staleness of 0 is synchronous training.

    Args:
        prompts_per_step: groups that a step trains.
        updates_per_step: weight versions that a step makes, at most.
        max_staleness: weight versions by which a trained token may be older than its step's start.
    """

    prompts_per_step: int
    updates_per_step: int = 1
    max_staleness: int = 0

    @property
    def steps(self) -> int:
        """Whole steps that may be generated ahead of the current one."""
        return self.max_staleness // self.updates_per_step

    @property
    def prompts(self) -> int:
        """Groups that may be in line: the current step's and those ahead."""
        return self.prompts_per_step * (1 + self.steps)


@dataclass(frozen=True, kw_only=True)
class Regenerated:
    """A group that was not fit for a step of `version` and is generated anew, for the run feed."""

    task: str
    epoch: int
    oldest: int  # versions of its sampled tokens
    newest: int
    version: int


def sampled_versions(group: TrajectoryGroup) -> Int32[np.ndarray, " T"]:
    """The weight version of every sampled token of a group."""
    versions = [each.versions[each.loss_mask] for each in group.trajectories]
    return np.concatenate([np.zeros(0, np.int32), *versions])


def within(group: TrajectoryGroup, *, version: int, max_staleness: int) -> bool:
    """Whether versions `version - max_staleness` to `version` sampled every token of the group."""
    versions_T = sampled_versions(group)
    return bool(((versions_T >= version - max_staleness) & (versions_T <= version)).all())


@dataclass
class _Place:
    """A ticket in line, and its group in the making or made."""

    ticket: Ticket
    group: asyncio.Future[TrajectoryGroup]

    @property
    def made(self) -> TrajectoryGroup | None:
        """The finished group; None while it is played, or if that failed."""
        over = self.group.done() and not self.group.cancelled() and self.group.exception() is None
        return self.group.result() if over else None


class Ahead:
    """The line of groups between generation and training. For one event loop; leave it to cancel all.

    Args:
        tickets: what to play, in the order in which it is trained.
        play: plays the group of a ticket; equal tickets draw equal randomness.
        position: the cursor's position before the first of them.
        saved: groups that an earlier attempt finished and did not train.
        on_regenerated: told of every group that is generated anew.
    """

    def __init__(
        self,
        tickets: Iterator[Ticket],
        play: Play,
        *,
        bound: Bound,
        position: int = 0,
        saved: Iterable[TrajectoryGroup] = (),
        on_regenerated: Callable[[Regenerated], None] = lambda _: None,
    ) -> None:
        self._tickets, self._play, self._bound = tickets, play, bound
        self.position = position  # the cursor's after the last group that was handed out
        self._saved = {(group.task, group.epoch): group for group in saved}
        self._on_regenerated = on_regenerated
        self._line: deque[_Place] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        playing = [place.group for place in self._line]
        for group in playing:
            group.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    @property
    def unfinished(self) -> int:
        """Groups in line that are being played."""
        return sum(not place.group.done() for place in self._line)

    def finished(self) -> list[TrajectoryGroup]:
        """Groups in line that are complete, in task order: to be saved with a checkpoint."""
        return [made for place in self._line if (made := place.made) is not None]

    def begin_step(self, *, version: int, left: int) -> None:
        """Lets generation move on by a step. To be called when weights of `version` are in use.

        `left` counts the steps to come, this one included: nothing is generated for others.
        """
        self._fill(min(self._bound.prompts, left * self._bound.prompts_per_step))
        for place in self._line:
            if (made := place.made) is not None and not self._fits(made, version):
                self._replay(place, made, version)

    async def groups(self, count: int, *, version: int) -> AsyncGenerator[TrajectoryGroup]:
        """The next `count` groups in task order, each as soon as it is there, fit for `version`.

        Raises what playing a group raises, and `RuntimeError` for a group generated anew that does not fit
        either, as when the weights in use are not those of `version`.
        """
        self._fill(count)
        for _ in range(count):
            group = await self._fit(self._line[0], version)
            self.position = self._line.popleft().ticket.position
            yield group

    def _fill(self, length: int) -> None:
        while len(self._line) < length:
            ticket = next(self._tickets)
            self._line.append(_Place(ticket, self._start(ticket)))

    def _start(self, ticket: Ticket) -> asyncio.Future[TrajectoryGroup]:
        saved = self._saved.pop((ticket.task.instance_id, ticket.epoch), None)
        if saved is None:
            return asyncio.ensure_future(self._play(ticket))
        group = asyncio.get_running_loop().create_future()
        group.set_result(saved)
        return group

    async def _fit(self, place: _Place, version: int) -> TrajectoryGroup:
        group = await _outcome(place.group)
        if self._fits(group, version):
            return group
        self._replay(place, group, version)
        group = await _outcome(place.group)
        if not self._fits(group, version):
            raise RuntimeError(
                f"task {group.task}: expected tokens sampled by version {version}, got versions "
                f"{sorted(set(sampled_versions(group).tolist()))}: hand the weights over before a step begins"
            )
        return group

    def _fits(self, group: TrajectoryGroup, version: int) -> bool:
        return within(group, version=version, max_staleness=self._bound.max_staleness)

    def _replay(self, place: _Place, group: TrajectoryGroup, version: int) -> None:
        versions_T = sampled_versions(group)
        self._on_regenerated(
            Regenerated(
                task=group.task,
                epoch=group.epoch,
                oldest=int(versions_T.min()),
                newest=int(versions_T.max()),
                version=version,
            )
        )
        place.group = asyncio.ensure_future(self._play(place.ticket))


async def _outcome(group: asyncio.Future[TrajectoryGroup]) -> TrajectoryGroup:
    """The group once it is made. Who waits can be cancelled without ending the group."""
    await asyncio.wait([group])
    return group.result()
