"""The scan of a file that this Python cannot parse: words of its text, wherever they stand.

Coarser than the syntax tree: a comment counts, and names of one module are looked for wherever the module is
mentioned. What an attack needs has to be spelled in some way that one of the two finds.
"""

import io
import re
import tokenize
import unicodedata
from collections.abc import Iterator

from sandbox.grading.scan_rules import ATTRIBUTES, MODULES, NAMES, STRINGS

_WORD = re.compile(r"[^\W\d]\w*")
_IMPORTS = re.compile(r"\b(import|from)\b")
_QUOTED = re.compile(r"""(['"])(.*?)\1""")
_CALLED = {name for name in NAMES if "." not in name}


def text_findings(content: bytes) -> Iterator[tuple[int, str]]:
    """(line, what) for everything of the rules in a text, as `scan.findings` words it."""
    text = _text(content)
    words = set(_WORD.findall(text))
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, what) for what in _of_line(line, words))


def _text(content: bytes) -> str:
    """As Python reads it: in the encoding it declares, letters in their plain form, long lines as one."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding, errors="replace")
    except (SyntaxError, LookupError):
        text = content.decode("latin-1")
    return unicodedata.normalize("NFKC", text.replace("\\\n", " "))


def _of_line(line: str, words: set[str]) -> Iterator[str]:
    here = set(_WORD.findall(line))
    yield from (f"uses .{each}" for each in here & ATTRIBUTES)
    yield from (f"uses {name}" for name in here & _CALLED if re.search(rf"(?<!\.)\b{name}\s*\(", line))
    for name in NAMES - _CALLED:
        *owner, last = name.split(".")
        if last in here and words.issuperset(owner):
            yield f"uses {name}"
    if _IMPORTS.search(line):
        yield from (f"imports {each}" for each in here & MODULES)
    for _, said in _QUOTED.findall(line):
        yield from (f"names {what}" for what, pattern in STRINGS.items() if pattern.search(said))
