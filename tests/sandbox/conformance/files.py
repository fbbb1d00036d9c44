"""Cases: reading, writing, and what counts as a change."""

from pathlib import Path

from sandbox.base import RejectedDiff, Sandbox

from .core import FILES, LIMITS, Stage, case, raises, run, say


@case()
async def read_and_write(stage: Stage) -> None:
    box = await stage.create()
    await box.write("deep/er/c.bin", b"\x00\xff")
    await box.write("/testbed/a.py", b"")
    assert await box.read("/testbed/deep/er/c.bin") == b"\x00\xff"
    assert await box.read("a.py") == b""
    assert await say(box, "echo more >> deep/er/c.bin && rm a.py && touch deep/er/new && echo ok") == "ok\n"
    big = bytes(range(256)) * 8192
    await box.write("big", big)
    assert await box.read("big") == big
    await box.write("ünï/ö ' $x", b"odd")
    assert await say(box, "cat ünï/*") == "odd"


@case()
async def read_errors(stage: Stage) -> None:
    box = await stage.create()
    for path, error in {"none": FileNotFoundError, "pkg": IsADirectoryError, "": FileNotFoundError}.items():
        with raises(error):
            await box.read(path)
    for path in ("a.py/x", "a\0b", "x" * 5000):
        with raises(OSError):
            await box.read(path)
    await run(box, "mkfifo pipe")
    with raises(OSError):
        await box.read("pipe")


@case()
async def write_errors(stage: Stage) -> None:
    box = await stage.create()
    for path in ("/usr/bin/x", "pkg", "a.py/x", "/proc/sys/kernel/hostname"):
        with raises(OSError):
            await box.write(path, b"")
    with raises(OSError):
        await box.write("big", bytes(LIMITS.disk + 1))
    assert await say(box, "echo fine") == "fine\n"


@case()
async def links_are_followed_inside_only(stage: Stage) -> None:
    secret = stage.folder / "secret"
    secret.write_text("host")
    box = await stage.create()
    outside = {"s": secret, "up": "../../../../../..", "d": stage.folder, "e": "/etc"}
    await run(box, "; ".join(f"ln -s {target} {name}" for name, target in outside.items()))
    for path in ("s", f"up{secret}", f"/testbed/../..{secret}", "d/secret", "e/shadow"):
        with raises(OSError):
            await box.read(path)
    for path in ("s", "d/new"):
        with raises(OSError):
            await box.write(path, b"overwritten")
    assert secret.read_text() == "host" and list(stage.folder.iterdir()) == [secret]
    await run(box, "ln -s a.py inner; ln -s pkg folder; ln -s loop loop")
    assert await box.read("inner") == FILES["a.py"] and await box.read("folder/b.py") == FILES["pkg/b.py"]
    with raises(OSError):
        await box.read("loop")


async def _changes(box: Sandbox, command: str) -> dict[str, bytes | None]:
    assert (await run(box, command)).exit_code == 0, command
    diff = await box.diff()
    assert not isinstance(diff, RejectedDiff), diff
    return dict(diff.files)


@case()
async def diff_of_every_kind_of_change(stage: Stage) -> None:
    box = await stage.create({**FILES, "gone/x": b"1", "same": b"s\n", "run.sh": b"true\n"})
    assert (await box.diff()).empty
    assert not await _changes(box, "echo s > same; chmod +x run.sh; mkdir empty; touch -d @0 a.py")
    assert await _changes(box, "mv pkg/b.py pkg/c.py") == {"pkg/b.py": None, "pkg/c.py": b"y = 2\n"}
    everything = await _changes(
        box,
        "mv pkg/c.py pkg/b.py; echo 'x = 2' > a.py; rm -r gone; mkdir -p n/__pycache__ .pytest_cache; "
        "printf '\\0\\377' > n/bin; touch n/__pycache__/d.pyc .pytest_cache/x 'n/sp ace'",
    )
    assert everything == {"a.py": b"x = 2\n", "gone/x": None, "n/bin": b"\0\xff", "n/sp ace": b""}
    assert await _changes(
        box, "rm a.py; mkdir a.py; echo in > a.py/f; rm -r n; mkdir gone; echo -n 1 > gone/x"
    )
    assert await _changes(box, "rm -r a.py; echo 'x = 1' > a.py") == {}


@case()
async def diff_does_not_count_what_was_adopted(stage: Stage) -> None:
    box = await stage.create({})
    await box.adopt({"a/b": b"1", "c": b"2"})
    assert (await box.diff()).empty
    await box.write("c", b"3")
    await box.write("d", b"4")
    assert (await box.diff()).files == {"c": b"3", "d": b"4"}


@case()
async def trees_that_are_no_patch_are_rejected(stage: Stage) -> None:
    box = await stage.create()
    for command in ("ln -s /etc/passwd l", "ln -s a.py l", "ln a.py l", "mkfifo l", "ln -s nowhere l"):
        await run(box, command)
        rejected = await box.diff()
        assert isinstance(rejected, RejectedDiff) and not rejected.empty and rejected.reason, command
        assert not rejected.files
        await run(box, "rm l")
        assert (await box.diff()).empty, command


@case("images")
async def source_and_layers_of_an_image(stage: Stage) -> None:
    source, layer = stage.folder / "source", stage.folder / "layer"
    _make_tree(source, layer)
    image = stage.variant(source=source, layers={"/opt/env": layer}, environment={"DEEP": "9"})
    one = await stage.create({"extra": b"e", "kept": b"changed\n"}, image=image)
    two = await stage.create({}, image=image)
    assert (
        await say(one, "cat kept sub/old extra; cat /opt/env/tool; echo $DEEP") == "changed\nold\netool\n9\n"
    )
    assert (await run(one, "echo x > /opt/env/tool || rm /opt/env/tool || touch /opt/env/n")).exit_code != 0
    await run(one, "rm sub/old; echo mine > kept; sh -c 'exit 0'")
    assert (await one.diff()).files == {"sub/old": None, "kept": b"mine\n"}
    assert (await one.exec("echo after > late; sleep 60", 1)).timed_out
    assert (await one.diff()).files == {"sub/old": None, "kept": b"mine\n", "late": b"after\n"}
    assert await say(two, "cat kept sub/old") == "kept\nold\n" and (await two.diff()).empty
    assert (source / "sub/old").read_text() == "old\n" and (source / "kept").read_text() == "kept\n"


@case("images", "links in a source")
async def links_of_a_source_are_no_change(stage: Stage) -> None:
    source, layer = stage.folder / "source", stage.folder / "layer"
    _make_tree(source, layer)
    (source / "link").symlink_to("sub/old")
    box = await stage.create({}, image=stage.variant(source=source))
    assert await say(box, "cat link") == "old\n" and (await box.diff()).empty
    assert (await box.exec("echo new > kept; sleep 60", 1)).timed_out
    assert (await box.diff()).files == {"kept": b"new\n"}
    await run(box, "rm link; ln -s kept link")
    assert isinstance(await box.diff(), RejectedDiff)


def _make_tree(source: Path, layer: Path) -> None:
    (source / "sub").mkdir(parents=True)
    layer.mkdir()
    (source / "kept").write_text("kept\n")
    (source / "sub/old").write_text("old\n")
    (layer / "tool").write_text("tool\n")
    for path in (stage := [source, source / "sub", layer]):
        path.chmod(0o755)
    stage[0].parent.chmod(0o755)
