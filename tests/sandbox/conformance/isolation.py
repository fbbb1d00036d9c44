"""Cases: what a sandbox can reach."""

import asyncio
import socket

from .core import Stage, case, mark, run, say

_CONNECT = (
    "import socket; s = socket.socket(); s.settimeout(2); "
    "print(s.connect_ex(('127.0.0.1', {port})), s.connect_ex(('10.0.0.1', 80)))"
)
_LOOPBACK = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    "c = socket.create_connection(s.getsockname(), 2); print('up')"
)


def _search(number: str) -> str:
    """Prints the processes with that argument; the brackets keep grep from finding itself."""
    return f"grep -l '[{number[0]}]{number[1:]}' /proc/[0-9]*/cmdline 2>/dev/null; true"


@case()
async def no_privileges(stage: Stage) -> None:
    box = await stage.create()
    assert int(await say(box, "id -u")) != 0
    status = await say(box, "grep -E 'CapEff|CapPrm|NoNewPrivs' /proc/self/status")
    assert sorted(status.split()) == sorted(
        ["CapEff:", "0000000000000000", "CapPrm:", "0000000000000000", "NoNewPrivs:", "1"]
    )
    assert (await run(box, "mount -t tmpfs none /tmp")).exit_code != 0
    for path in ("/usr/x", "/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname"):
        assert (await run(box, f"echo 1 > {path}")).exit_code != 0, path


@case("no user namespaces")
async def no_user_namespaces(stage: Stage) -> None:
    box = await stage.create()
    assert (await run(box, "unshare -Ur true")).exit_code != 0


@case("images")
async def covered_paths_are_empty_and_stay_so(stage: Stage) -> None:
    image = stage.variant(covered_folders=("/usr/share", "/usr/include"), covered_files=("/usr/bin/yes",))
    box = await stage.create(image=image)
    show = "ls -A /usr/share /usr/include | grep -v '^/usr'; cat /usr/bin/yes"
    assert (await say(box, show)).strip() == ""
    for command in ("touch /usr/share/x", "rmdir /usr/share", "rm /usr/bin/yes", "umount /usr/share"):
        assert (await run(box, command)).exit_code != 0, command
    await run(box, "echo x > /usr/bin/yes")
    await box.exec("exit 3", 10)  # also when it is rebuilt
    assert (await say(box, show)).strip() == ""
    assert await say(box, "cat a.py; [ -e /usr/bin/env ] && echo there") == "x = 1\nthere\n"


@case()
async def host_is_out_of_sight(stage: Stage) -> None:
    secret = stage.folder / "secret"
    secret.write_text("host")
    box, number = await stage.create(), mark()
    host = await asyncio.create_subprocess_exec("sleep", number)
    try:
        assert (await run(box, f"cat {secret} /etc/shadow /root/.profile")).exit_code != 0
        assert await say(box, _search(number)) == ""
        assert (await run(box, f"kill -9 {host.pid}")).exit_code != 0 and host.returncode is None
    finally:
        host.kill()
        await host.wait()
    names = await say(box, "env | cut -d= -f1")
    assert "PATH" in names and not {"PYTEST_CURRENT_TEST", "SSH_AUTH_SOCK", "OLDPWD_HOST"} & set(
        names.split()
    )


@case()
async def network_is_loopback_only(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        box = await stage.create()
        port = server.getsockname()[1]
        codes = (await say(box, f'python3 -c "{_CONNECT.format(port=port)}"')).split()
        assert [code for code in codes if code != "0"] == codes and len(codes) == 2
    assert await say(box, f'python3 -c "{_LOOPBACK}"') == "up\n"
    assert await say(box, "sed 1,2d /proc/net/dev | cut -d: -f1 | tr -d ' \\n'") == "lo"


@case()
async def sandboxes_do_not_see_each_other(stage: Stage) -> None:
    one, two = await asyncio.gather(stage.create(), stage.create())
    number = mark()
    await run(one, f"echo private > /tmp/p; echo private > p; sleep {number} >/dev/null 2>&1 &")
    assert await say(two, "cat /tmp/p p 2>/dev/null; ls") == "a.py\npkg\n"
    while not await say(one, _search(number)):  # until the background shell has become the program
        await asyncio.sleep(0.02)
    assert await say(two, _search(number)) == ""
    assert await say(one, "cat /tmp/p p") == "private\nprivate\n"
