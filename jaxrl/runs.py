"""A run directory opened for training: one writer, resumed from its newest checkpoint. Entry points only."""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from jaxrl.assembly import package_versions
from jaxrl.config import Config, ConfigError, to_yaml
from jaxrl.contracts import TrajectoryGroup
from jaxrl.evaluation import Evaluation, from_event
from jaxrl.feed.reader import read_events, read_run
from jaxrl.feed.writer import RunWriter
from jaxrl.rl.checkpoint import CheckpointStore, Restored
from jaxrl.rl.learner import Learner
from jaxrl.rollout.group_codec import decode_groups, encode_groups

GROUPS = "groups.npz"
FREE_TO_CHANGE = {"run", "evaluation", "checkpoint", "sandbox", "grader", "sft", "replay"}
"""Sections that may differ when a run goes on; a change elsewhere would make it another experiment."""


@dataclass
class OpenRun:
    """What the loop writes to, and where it goes on: `step` steps and `cursor` tasks are done.

    `groups` were finished ahead of their step when the checkpoint was written. `ages` counts the tokens
    trained since the run's start by their age in weight versions.
    """

    path: Path
    feed: RunWriter
    store: CheckpointStore
    step: int
    cursor: int
    fresh: bool  # there was no checkpoint
    damaged: int = 0  # checkpoints that were skipped
    groups: Sequence[TrajectoryGroup] = ()
    ages: dict[int, int] = field(default_factory=dict)

    @property
    def greeting(self) -> str:
        """Where the run stands, for people."""
        began = f"goes on after step {self.step}" if self.step else "starts"
        skipped = f"; {self.damaged} newer checkpoints are damaged" if self.damaged else ""
        return f"run {self.path} {began} (attempt {self.feed.attempt}){skipped}"

    def save(
        self, step: int, cursor: int, learner: Learner, *, groups: Sequence[TrajectoryGroup] = ()
    ) -> None:
        """Writes a checkpoint after `step`, with groups that wait to be trained, and says so in the feed.

        Raises `ConfigError` if the disk refuses.
        """
        ages = {str(age): count for age, count in sorted(self.ages.items())}
        try:
            self.store.save(
                learner.state(),
                step=step,
                version=learner.version,
                progress={"cursor": cursor, "ages": ages},
                files={GROUPS: encode_groups(groups)} if groups else {},
            )
        except OSError as error:
            raise ConfigError(
                f"step {step} could not be saved, so the run stops; started again, it goes on from the "
                f"checkpoint before: {error}"
            ) from error
        self.feed.event("checkpoint", step, cursor=cursor, version=learner.version, groups=len(groups))


@contextmanager
def open_run(path: Path, config: Config, learner: Learner) -> Iterator[OpenRun]:
    """Opens `path` for one process, and loads its newest checkpoint into `learner`.

    Raises:
        ConfigError: the folder can't be written, another process trains this run, or it was started
            with other settings or another model.
    """
    with _lock_file(path) as lock:
        _lock(lock, path)
        skipped: list[Mapping[str, Any]] = []
        store = CheckpointStore(
            path / "checkpoints", keep=config.checkpoint.keep, report=lambda _, facts: skipped.append(facts)
        )
        if store.paths():  # else nothing goes on: the run starts anew, with whatever settings
            _check_settings(path, config)
        restored = _restored(store, learner, path)
        feed = RunWriter(
            path,
            config=config.model_dump(mode="json"),
            versions=package_versions(),
            resumed_from=restored.step if restored else None,
        )
        for facts in skipped:
            feed.event("alert", reason=f"checkpoint skipped: {facts['reason']}", path=facts["path"])
        (path / "config.yaml").write_text(to_yaml(config))
        try:
            yield _opened(path, feed, store, restored, damaged=len(skipped))
            store.wait()
        finally:
            feed.close()


def _restored(store: CheckpointStore, learner: Learner, path: Path) -> Restored | None:
    """The newest undamaged checkpoint, loaded into `learner`."""
    try:
        restored = store.latest(learner.state(), files=True)
        if restored:
            learner.load(restored.state, version=restored.version)
        return restored
    except ValueError as error:
        raise ConfigError(
            f"{path}: its checkpoints are another model's than model.checkpoint or model.preset now names; "
            f"restore that, or choose another run.run_name: {error}"
        ) from error


def _opened(
    path: Path, feed: RunWriter, store: CheckpointStore, restored: Restored | None, *, damaged: int
) -> OpenRun:
    if restored is None:
        return OpenRun(path, feed, store, 0, 0, fresh=True, damaged=damaged)
    groups = decode_groups(restored.files[GROUPS]) if GROUPS in restored.files else []
    ages = {int(age): count for age, count in restored.progress.get("ages", {}).items()}
    cursor = restored.progress["cursor"]
    return OpenRun(
        path, feed, store, restored.step, cursor, fresh=False, damaged=damaged, groups=groups, ages=ages
    )


def evaluations(run: Path) -> list[Evaluation]:
    """The evaluations of a run that still count, oldest first."""
    return [from_event(row) for row in read_events(run, "eval")]


def _lock_file(path: Path) -> TextIO:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return (path / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"can't write the run's folder {path}: {error.strerror}") from error


def _lock(file: Any, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path}: another process trains this run; stop it, or choose another run.run_name"
        ) from None


def _check_settings(path: Path, config: Config) -> None:
    try:
        before = read_run(path)["config"]
    except FileNotFoundError:
        return
    # A setting that did not exist then had no other effect than its default has now.
    before, now = _merged(Config().model_dump(mode="json"), before), config.model_dump(mode="json")
    changed = [
        f"{section}.{key}: {before[section][key]!r} then, {value!r} now"
        for section, values in now.items()
        if section not in FREE_TO_CHANGE
        for key, value in values.items()
        if before[section][key] != value
    ]
    if now["run"]["seed"] != before["run"]["seed"]:
        changed.append(f"run.seed: {before['run']['seed']} then, {now['run']['seed']} now")
    if changed:
        raise ConfigError(
            f"{path} was started with other settings; restore them, or choose another run.run_name:\n  "
            + "\n  ".join(changed)
        )


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, key by key at every depth."""
    deep = {key: _merged(base[key], value) for key, value in over.items() if _both(base.get(key), value)}
    return {**base, **over, **deep}


def _both(first: object, second: object) -> bool:
    return isinstance(first, Mapping) and isinstance(second, Mapping)
