"""How many commands a text holds, by the grammar of bash."""

from itertools import pairwise

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_LANGUAGE = Language(tree_sitter_bash.language())
# The grammar's scanner looks up characters in a table that ends with ASCII: others can end this process
# (tree-sitter-bash issue 337). To bash they are parts of words, as these letters, which spell no keyword.
_AS_LETTERS = bytes(byte if byte < 128 else ord("A") + byte % 26 for byte in range(256))


def split_commands(text: str) -> list[str]:
    """The top-level commands of `text`, those that a line end separates.

    `;`, `&&`, `|` and `&` join on a line; a loop, a function or a heredoc is one command whatever
    lines it has. What the grammar cannot read is one command: bash itself has to judge it.
    """
    source = text.encode(errors="surrogatepass")
    root = Parser(_LANGUAGE).parse(source.translate(_AS_LETTERS)).root_node
    statements = [node for node in root.named_children if node.type != "comment"]
    if root.has_error or not statements:
        return [text.strip()]
    starts = [0]
    for before, after in pairwise(statements):
        if b"\n" in source[before.end_byte : after.start_byte] or _ends_in_heredoc(before):
            starts.append(after.start_byte)
    ends = [*starts[1:], len(source)]
    parts = (source[start:end] for start, end in zip(starts, ends, strict=True))
    return [part.decode(errors="surrogatepass").strip() for part in parts]


def _ends_in_heredoc(node: Node) -> bool:
    """Whether the statement's last line ends a heredoc, whose node holds the line end itself."""
    last = node
    while last.named_children:
        last = last.named_children[-1]
    return last.type in ("heredoc_end", "heredoc_body")
