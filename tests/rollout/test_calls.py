"""Tool-call syntax: what is written can be read, and nothing that is read can raise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rollout.calls import BAD_CALL, NO_CALL, Call, parse_calls, render_call

MARKS = ("<parameter=", "</parameter>", "<tool_call>", "</tool_call>")
names = st.from_regex(r"[A-Za-z_][\w.-]{0,8}", fullmatch=True)
values = st.text(max_size=30).filter(lambda value: not any(mark in value for mark in MARKS))
calls = st.builds(
    Call,
    name=names,
    arguments=st.dictionaries(names, values | st.sampled_from(["", "\n", "</function>"]), max_size=3),
)
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=view>", "<function=", "<function=a b>", "</function>",
    "<parameter=path>", "<parameter=", "</parameter>", "\n", "app.py", "<", ">", "a < b", "<think>",
    "<parameter=path", "\ufffd", "<function=>",
)  # fmt: skip


@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from(["", "Let me look.\n\n"]))
def test_parse_inverts_render(wanted, content):
    text = content + "\n".join(render_call(call.name, call.arguments) for call in wanted)
    parsed = parse_calls(text)
    assert (list(parsed.calls), parsed.content, parsed.error) == (wanted, content.strip(), "")


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=24).map("".join))
def test_garbage_never_raises_and_is_never_silent(text):
    parsed = parse_calls(text)
    assert bool(parsed.error) != any(not call.error for call in parsed.calls)
    assert (parsed.error == NO_CALL) == ("<tool_call>" not in text)
    assert len(parsed.calls) == text.count("<tool_call>")
    for call in parsed.calls:
        assert call.error or call == parse_calls(render_call(call.name, call.arguments)).calls[0]


WHOLE = render_call("str_replace", {"path": "app.py", "old_str": "a < b", "new_str": "a > b"})


@pytest.mark.parametrize("stop", range(len(WHOLE)))
def test_a_cut_call_is_an_error_and_keeps_its_whole_parameters(stop):
    parsed = parse_calls(WHOLE[:stop])
    assert parsed.error
    wanted = {"path": "app.py", "old_str": "a < b", "new_str": "a > b"}
    for call in parsed.calls:
        assert call.error == BAD_CALL and call.arguments.items() <= wanted.items()
    if stop > WHOLE.index("<parameter=old_str>"):
        assert parsed.calls[0].arguments["path"] == "app.py"


@pytest.mark.parametrize(
    "text",
    [
        WHOLE.replace("<function=str_replace>", "<function=str_replace"),
        WHOLE.replace("<parameter=path>", "<parameter=path"),
        WHOLE.replace("</function>", ""),
        WHOLE.replace("<parameter=old_str>", "<parameter=path>"),
        WHOLE.replace("app.py\n</parameter>", "app.py"),
        WHOLE.replace("</function>", "stray</function>"),
        '<tool_call>\n{"name": "view", "arguments": {"path": "app.py"}}\n</tool_call>',
    ],
)
def test_malformed_calls_must_not_run(text):
    parsed = parse_calls(text)
    assert parsed.error == BAD_CALL and [call.error for call in parsed.calls] == [BAD_CALL]


def test_a_bad_call_does_not_lose_the_good_one_beside_it():
    parsed = parse_calls(WHOLE.replace("</function>", "") + "\n" + render_call("finish", {}))
    assert [(call.name, bool(call.error)) for call in parsed.calls] == [
        ("str_replace", True),
        ("finish", False),
    ]
    assert not parsed.error


def test_values_keep_every_newline_but_the_two_of_the_syntax():
    text = render_call("f", {"x": "\n  a\n\n"})
    assert parse_calls(text).calls[0].arguments == {"x": "\n  a\n\n"}


def test_render_refuses_what_it_cannot_carry():
    with pytest.raises(ValueError, match="markup"):
        render_call("f", {"x": "a</parameter>b"})
    with pytest.raises(ValueError, match="names"):
        render_call("f>", {})
