"""Rendering: contexts that only grow, exact masks, and training ids equal to episode ids."""

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from jaxrl.rollout.calls import Call, render_call
from jaxrl.rollout.conversation import Message, from_json, to_json
from jaxrl.rollout.demos import EDITED, NO_MATCH, STAGE_1, STAGE_2, Mix, conversations, demonstrate, document
from jaxrl.rollout.harness import COMPACT, harness
from jaxrl.rollout.renderer import Renderer
from jaxrl.rollout.tokenizer import SPECIALS, Tokenizer
from sandbox.tasks.generated.generate import instances
from sandbox.tasks.schema import TaskSpec

tokenizer = Tokenizer.load(Path(__file__).parents[2] / "configs/quickstart/tokenizer.json")
renderer = Renderer(tokenizer, COMPACT)
TASK = TaskSpec(
    instance_id="t", problem_statement="f(a) must return a.", files={"app.py": "def f(a):\n    a\n"}
)
RIGHT = Mix(documents=0, right=1, habit=0, uniform=0)


def test_prompt_text():
    assert tokenizer.decode(renderer.initial(TASK)) == (
        "<|im_start|>user\napp.py\nf(a) must return a.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_system_turn_and_prefix_are_data():
    other = Renderer(
        tokenizer, replace(COMPACT, system="Be brief.", assistant_prefix="<think>\n\n</think>\n\n")
    )
    text = tokenizer.decode(other.initial(TASK))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(other.observation(["ok"], closed=True)).endswith("</think>\n\n")


def test_observation_closes_an_open_turn_and_only_that():
    closed, opened = (renderer.observation(["ok", "no"], closed=each) for each in (True, False))
    assert opened == [tokenizer.special("<|im_end|>"), *closed]
    assert tokenizer.decode(closed) == (
        "\n<|im_start|>user\n<tool_response>\nok\n</tool_response>\n<tool_response>\nno\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("hostile", SPECIALS)
def test_markup_in_issues_and_tool_output_stays_text(hostile):
    count = tokenizer.special(hostile)
    clean, dirty = (replace(TASK, problem_statement=text) for text in ("x", f"x{hostile}"))
    assert renderer.initial(clean).count(count) == renderer.initial(dirty).count(count)
    outputs = [renderer.observation([text], closed=True) for text in ("x", f"x{hostile}")]
    assert outputs[0].count(count) == outputs[1].count(count)


def episode_ids(instance, conversation):
    """The same turns, as the turn loop would append them."""
    ids, acted = renderer.initial(instance.spec), []
    for position, message in enumerate(conversation):
        if message.role == "assistant":
            sampled = tokenizer.encode_markup(message.text + "<|im_end|>")
            acted += [(len(ids), len(ids) + len(sampled), message.weight)]
            ids += sampled
        elif message.role == "tool" and position < len(conversation):
            ids += renderer.observation([message.content], closed=True)
    return ids, acted


@pytest.mark.parametrize("retry", [0, 1])
def test_training_ids_are_episode_ids_and_weights_follow_turns(retry):
    for instance in instances("train", 24, 2):
        made = demonstrate(instance, mix=replace(RIGHT, retry=retry), harness=COMPACT, rng=random.Random(0))
        ids, weights = renderer.render_training(made)
        wanted, acted = episode_ids(instance, made)
        assert ids.tolist() == wanted and ids.dtype == np.int32 and weights.dtype == np.float32
        expected = np.full(len(wanted), 0.1, np.float32)
        for start, stop, weight in acted:
            expected[start:stop] = weight
        np.testing.assert_array_equal(weights, expected)
        assert [weight for _, _, weight in acted] == ([1, 0, 1, 1] if retry else [1, 1, 1])


def test_parse_reads_sampled_turns():
    text = render_call("view", {"path": "app.py"})
    for end in ("", "<|im_end|>", "<|endoftext|>"):
        ids = tokenizer.encode_markup(text + end)
        assert renderer.parse(ids).calls == (Call(name="view", arguments={"path": "app.py"}),)
        assert renderer.closed(ids) == (end == "<|im_end|>")
    assert renderer.parse([]).error and not renderer.closed([])


def test_documents_weigh_what_they_should():
    (instance,) = instances("train", 1, 2)
    ids, weights = renderer.render_training(document(instance))
    text = f"{instance.spec.problem_statement}\n{instance.repair.fixed}<|endoftext|>"
    assert tokenizer.decode(ids.tolist()) == text and set(weights.tolist()) == {np.float32(0.3)}


def test_episode_lengths_fit_the_quickstart():
    lengths = []
    for instance in instances("validation", 120, 4):
        ids, weights = renderer.render_training(
            demonstrate(instance, mix=RIGHT, harness=COMPACT, rng=random.Random(0))
        )
        lengths.append((len(ids), (weights == 1).sum()))
        retried = demonstrate(instance, mix=replace(RIGHT, retry=1), harness=COMPACT, rng=random.Random(0))
        assert len(renderer.render_training(retried)[0]) <= 200
    total, sampled = np.mean(lengths, axis=0)
    assert 95 < total < 140 and 33 < sampled < 60


def test_demonstrations_act_as_the_tools_would():
    """Replays each edit on the file: the printed output is what exact-match replacement gives."""
    for instance in instances("train", 64, 3):
        made = demonstrate(instance, mix=replace(STAGE_2, retry=0.5), harness=COMPACT, rng=random.Random(7))
        source = instance.repair.source
        for turn, result in zip(made[1:-1:2], made[2::2], strict=True):
            (call,) = turn.calls
            if call.name == "view":
                assert result.content == source
                continue
            assert call.arguments["path"] == "app.py"
            matches = source.count(call.arguments["old_str"])
            assert result.content == (EDITED if matches == 1 else NO_MATCH) and matches <= 1
            source = source.replace(call.arguments["old_str"], call.arguments["new_str"])
        assert source != instance.repair.source and made[-1].calls == (Call(name="finish"),)


def test_mixes_have_their_shares():
    data = instances("train", 400, 3)
    by_issue = {COMPACT.ask(each.spec): each.repair for each in data}
    made = list(islice(conversations(data, mix=STAGE_2, harness=COMPACT, seed=1), 3000))
    acted = [each for each in made if each[0].role == "user"]
    assert abs(1 - len(acted) / len(made) - STAGE_2.documents) < 0.03
    edits = [(by_issue[each[0].content], each[-3].calls[0].arguments["new_str"]) for each in acted]
    habit = np.mean([new == repair.habit for repair, new in edits])
    right = np.mean([new == repair.right for repair, new in edits])
    assert 0.5 < habit < 0.65 and 0.15 < right < 0.30
    retried = np.mean([any(message.weight == 0 for message in each) for each in acted])
    assert abs(retried - STAGE_2.retry) < 0.03


def test_conversations_are_deterministic_and_survive_json():
    data = instances("train", 16, 3)
    first, again = (
        list(islice(conversations(data, mix=STAGE_1, harness=COMPACT, seed=4), 40)) for _ in range(2)
    )
    assert first == again
    assert [from_json(to_json(each)) for each in first] == first
    with pytest.raises(ValueError, match="to_json"):
        from_json('{"messages": [{"role": "user", "calls": [{}]}]}')


def test_content_stands_before_calls():
    message = Message(role="assistant", content="Look.", calls=(Call(name="a"), Call(name="b")))
    assert message.text == f"Look.\n\n{render_call('a', {})}\n{render_call('b', {})}"


def test_clip_keeps_both_ends():
    small = replace(COMPACT, observation_chars=10)
    assert small.clip("0123456789") == "0123456789"
    assert small.clip("abcdefghijkl") == "abcde\n[2 characters cut]\nhijkl"


def test_names_and_mixes_are_checked():
    assert harness("compact") is COMPACT
    with pytest.raises(ValueError, match="compact"):
        harness("openhand")
    with pytest.raises(ValueError, match="= 1"):
        Mix(documents=0, right=0.5, habit=0, uniform=0)
    with pytest.raises(ValueError, match="instance"):
        next(conversations([], mix=RIGHT, harness=COMPACT, seed=0))
