"""Apptainer's command line as it is written, and what is said where it cannot run."""

import os
import shutil
from pathlib import Path

import pytest

from sandbox.apptainer_backend import PREFIX, ApptainerProvider
from sandbox.base import Image, Limits, SandboxError


@pytest.fixture
def plain_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def provider(folder: Path, **options: bool) -> ApptainerProvider:
    return ApptainerProvider(command="/opt/apptainer", folder=folder, **options)


@pytest.mark.usefixtures("plain_user")
def test_the_command_line(tmp_path: Path) -> None:
    image = Image(
        root=Path("/images/a.sif"), layers={"/opt/env": Path("/host/env")}, environment={"A": "b c"}
    )
    line = provider(tmp_path).arguments(image, Limits(), Path("/scratch/x"), ["/bin/sh"])
    common = ["HOME=/tmp", "LANG=C.UTF-8", "TERM=dumb", "PYTHONDONTWRITEBYTECODE=1", "A=b c"]
    assert line == [
        *("/opt/apptainer", "exec", "--writable-tmpfs", "--cleanenv", "--pid"),
        *("--no-mount", "home,tmp,bind-paths", "--net", "--network", "none"),
        *(part for variable in common for part in ("--env", variable)),
        *("--mount", "type=bind,src=/scratch/x,dst=/testbed"),
        *("--mount", "type=bind,src=/host/env,dst=/opt/env,ro"),
        *("--pwd", "/testbed", "/images/a.sif", "/bin/sh"),
    ]


@pytest.mark.usefixtures("plain_user")
def test_the_network_is_cut_unless_asked_otherwise(tmp_path: Path) -> None:
    image, work = Image(name="docker://debian"), Path("/w")
    assert "--net" in provider(tmp_path).arguments(image, Limits(), work, [])
    assert "--net" not in provider(tmp_path).arguments(image, Limits(network=True), work, [])
    assert "--net" not in provider(tmp_path, isolate_network=False).arguments(image, Limits(), work, [])


def test_what_cannot_work_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxError, match="plain user"):
        provider(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="on PATH"):
        ApptainerProvider()


@pytest.mark.usefixtures("plain_user")
async def test_images_are_required(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="Image.root"):
        await provider(tmp_path).create({}, Limits())


async def test_only_directories_of_dead_owners_are_reaped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid or 1000)
    made = provider(tmp_path)
    gone = made.owner.replace(f":{os.getpid()}:", ":999999999:")
    for name, owner in {"live": made.owner, "dead": gone}.items():
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / "owner").write_text(owner)
        os.chown(tmp_path / f"{PREFIX}{name}", os.geteuid(), -1)
    (tmp_path / "other").mkdir()
    assert await made.reap() == 1
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}live", "other"}
