"""A small released project for tests of task making: an archive in the cache, so that nothing is fetched."""

import hashlib
import io
import tarfile
from pathlib import Path

CODE = '''"""Counts."""


def clip(value, low, high):
    """Keeps value between low and high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


class Tally:
    """Counts what it sees."""

    def __init__(self, start=0):
        self.count = start
        self.last = None

    def add(self, item, times=1):
        """Notes an item."""
        self.count += times
        self.last = item
        return self.count
'''
TESTS = {
    "tests/conftest.py": "import pytest\n\n@pytest.fixture\ndef five():\n    return 5\n",
    "tests/test_clip.py": (
        "from counts import clip\n\n\ndef test_low():\n    assert clip(1, 2, 9) == 2\n\n\n"
        "def test_high(five):\n    assert clip(10, 2, five) == 5\n\n\n"
        "def test_equal():\n    assert clip(2, 2, 9) == 2\n"
    ),
    "tests/test_tally.py": (
        "from counts import Tally\n\n\ndef test_add():\n    tally = Tally()\n    assert tally.add('a') == 1\n"
        "    assert tally.last == 'a'\n\n\ndef test_start():\n    assert Tally(4).count == 4\n\n\n"
        "def test_times():\n    assert Tally().add('b', 3) == 3\n"
    ),
}
LITTER = {
    "PKG-INFO": "Name: counts\n",
    "src/counts.egg-info/SOURCES.txt": "counts.py\n",
    "src/counts.py.orig": "old\n",
    "src/__pycache__/counts.cpython-312.pyc": "x",
    "build/lib/counts.py": "x = 1\n",
}


def release(cache: Path, version: str, files: dict[str, str]) -> str:
    """Puts the archive of a release into `cache` as if it had been fetched; returns its sha256."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"counts-{version}/{path}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo(f"counts-{version}/link")
        link.type, link.linkname = tarfile.SYMTYPE, "src"
        tar.addfile(link)
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    place = cache / "archives" / digest
    place.mkdir(parents=True)
    (place / f"counts-{version}.tar.gz").write_bytes(data.getvalue())
    return digest


def catalogue(digest: str, also: dict[str, str] | None = None) -> str:
    """projects.yaml of the mini project."""
    lines = [
        "- name: counts",
        "  version: 1.0",
        f"  sha256: {digest}",
        "  licence: MIT",
        "  code: [src/*.py]",
        "  tests: [tests/test_*.py]",
        "  metadata: src",
        *(["  also:"] if also else []),
        *(f"    {version!r}: {each}" for version, each in (also or {}).items()),
    ]
    return "\n".join(lines).replace("version: 1.0", "version: '1.0'") + "\n"
