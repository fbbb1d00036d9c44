"""The groups that the trainer trains on, from the settings: cursor, collector, and how far they run ahead."""

import asyncio

from jaxrl.assembly import build_sampling
from jaxrl.config import Config, ConfigError
from jaxrl.contracts import TrajectoryGroup
from jaxrl.feed.writer import Value
from jaxrl.rollout.agent import World
from jaxrl.rollout.ahead import Ahead, Bound, Regenerated
from jaxrl.rollout.collector import Collector, CollectorOptions, Retry
from jaxrl.rollout.cursor import TaskCursor, Ticket
from jaxrl.runs import OpenRun
from jaxrl.tasksets import Tasks


def bound(config: Config) -> Bound:
    """How far generation may run ahead of training. Raises `ConfigError` if that is less than a step."""
    chosen = Bound(
        prompts_per_step=config.rl.prompts_per_step,
        updates_per_step=config.rl.updates_per_step,
        max_staleness=config.rl.max_staleness,
    )
    if chosen.max_staleness and not chosen.steps:
        raise ConfigError(
            f"rl.max_staleness = {chosen.max_staleness}: expected 0, or at least rl.updates_per_step = "
            f"{chosen.updates_per_step}, the weight versions that a step makes, to generate a step ahead"
        )
    return chosen


class Supply:
    """Opens the line of groups of a run, and counts the rollouts and groups played again in a step."""

    def __init__(self, config: Config, opened: OpenRun, world: World) -> None:
        self._config, self._opened, self._world = config, opened, world
        self.slots = asyncio.Semaphore(config.sandbox.concurrency)
        self.retried = self.regenerated = 0

    def open(self, tasks: Tasks) -> Ahead:
        """The groups of `tasks` from the run's cursor on. Raises `ConfigError` for a truncated sampling."""
        opened, limit = self._opened, bound(self._config)
        cursor = TaskCursor(tasks.specs, per_step=limit.prompts_per_step, position=opened.cursor)
        collector = Collector(self._world, options=self._collecting(), on_retry=self._retry, slots=self.slots)

        async def play(ticket: Ticket) -> TrajectoryGroup:
            hidden = tasks.hidden(ticket.task.instance_id)
            return await collector.collect_group(ticket.task, hidden, epoch=ticket.epoch)

        return Ahead(
            cursor,
            play,
            bound=limit,
            position=opened.cursor,
            saved=opened.groups,
            on_regenerated=self._regenerate,
        )

    def begin_step(self) -> None:
        """Counts from 0 again."""
        self.retried = self.regenerated = 0

    def metrics(self, groups: Ahead) -> dict[str, Value]:
        """What a step had to play again, and how far the line is ahead at its end."""
        return {
            "rollouts/retried": self.retried,
            "groups/regenerated": self.regenerated,
            "groups/waiting": len(groups.finished()),
            "groups/in_flight": groups.unfinished,
        }

    def _collecting(self) -> CollectorOptions:
        return CollectorOptions(
            seed=self._config.run.seed,
            group_size=self._config.rl.group_size,
            sampling=build_sampling(self._config),
            episodes=self._config.sandbox.concurrency,
        )

    def _retry(self, retry: Retry) -> None:
        self.retried += 1
        self._opened.feed.event(
            "alert",
            reason=f"rollout retried after {retry.outcome.value}: {retry.detail}",
            task=retry.task,
            sample=retry.sample,
        )

    def _regenerate(self, group: Regenerated) -> None:
        self.regenerated += 1
        self._opened.feed.event(
            "alert",
            reason=f"group generated anew: its tokens are of versions {group.oldest} to {group.newest}, too "
            f"old or unknown for a step that starts at version {group.version}",
            task=group.task,
            epoch=group.epoch,
        )
