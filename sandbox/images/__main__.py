"""Images for sandboxes: python -m sandbox.images build

    build    installs a file of locked requirements as the environment that sandboxes show at /opt/env
    debian   makes a Debian root with mmdebstrap, where it is installed
    unpack   extracts a squashfs or SIF file, for those who cannot mount it

Each prints the folder it made; what is there already is not made again. They lie in $JAXRL_CACHE,
$XDG_CACHE_HOME/jaxrl or ~/.cache/jaxrl (/var/cache/jaxrl for root).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.images.debian import PACKAGES, build_debian
from sandbox.images.environment import ImageBuildError, build_environment
from sandbox.images.unpack import unpack


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 if an image could not be made."""
    options = _parser().parse_args(arguments)
    try:
        print(options.make(options))
    except (ImageBuildError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.images", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build")
    build.add_argument("requirements", nargs="?", type=Path, default=Path("configs/tasks/environment.txt"))
    build.add_argument("--workdir", default="/testbed", help="where working copies are, inside")
    build.set_defaults(make=lambda got: build_environment(got.requirements, workdir=got.workdir))
    debian = commands.add_parser("debian")
    debian.add_argument("suite", nargs="?", default="stable")
    debian.add_argument("--packages", nargs="+", default=PACKAGES)
    debian.set_defaults(make=lambda got: build_debian(got.suite, got.packages))
    squashfs = commands.add_parser("unpack")
    squashfs.add_argument("image", type=Path)
    squashfs.set_defaults(make=lambda got: unpack(got.image))
    return parser


if __name__ == "__main__":
    sys.exit(main())
