"""The turn loop: exact ids and masks, every way to end, and nothing left behind."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from jaxrl.contracts import OUTCOME_RULES, Generation, Outcome, OutcomeRule, SampleKey
from jaxrl.rollout.agent import World, run_episode
from jaxrl.rollout.calls import BAD_CALL, NO_CALL, OPEN
from jaxrl.rollout.harness import COMPACT
from jaxrl.rollout.transcript import Transcript
from sandbox.base import SandboxError
from tests.rollout.rollout_fakes import (
    ATTEMPT,
    END,
    FINISH,
    INSTANCE,
    SOLVE,
    TOKENIZER,
    FakeGenerator,
    FakeProvider,
    edit,
    ids,
    view,
    world,
)


def play(around: World, *, task=INSTANCE.spec, attempt=ATTEMPT):
    made = asyncio.run(run_episode(task, INSTANCE.hidden, attempt=attempt, world=around))
    check(around, made)
    return made


def check(around, made):
    """What holds for every episode, however it ended (T1, T3, T4)."""
    session = around.generator.sessions[-1]
    assert made.tokens.tolist() == session.context and session.closed and around.sandboxes.alive == 0
    mask = np.zeros(len(made.tokens), bool)
    for turn in made.turns:
        mask[turn.start : turn.stop] = turn.role == "assistant"
    np.testing.assert_array_equal(made.loss_mask, mask)
    expected = np.where(mask, -0.5 - made.tokens / 1024, 0).astype(np.float32)
    np.testing.assert_array_equal(made.logprobs, expected)
    np.testing.assert_array_equal(made.full_logprobs, np.where(mask, expected - 0.25, 0))
    assert (made.versions[~mask] == -1).all() and (made.versions[mask] >= 3).all()
    assert [turn.start for turn in made.turns[1:]] == [turn.stop for turn in made.turns[:-1]]
    assert [turn.role for turn in made.turns] == ["prompt", "assistant", *["tool", "assistant"] * 9][
        : len(made.turns)
    ]


def text_of(made) -> str:
    return TOKENIZER.decode(made.tokens.tolist())


def test_view_edit_finish_is_resolved():
    around = world(FakeGenerator(SOLVE))
    made = play(around)
    assert (made.outcome, made.reward, made.detail) == (Outcome.RESOLVED, 1.0, "judged")
    assert (made.task, made.epoch, made.sample) == (INSTANCE.spec.instance_id, 2, 0)
    assert made.loss_mask.sum() == sum(len(ids(turn)) for turn in SOLVE)
    assert around.grader.diffs[0].files == {"app.py": INSTANCE.repair.fixed.encode()}
    assert f"<tool_response>\n{INSTANCE.repair.source}</tool_response>" in text_of(made)
    assert set(made.timings) == {"episode", "generation", "tools", "sandbox", "grading"}
    assert all(seconds >= 0 for seconds in made.timings.values())


def test_wrong_edit_is_unresolved_and_finish_alone_creates_an_empty_diff():
    assert play(world(FakeGenerator((edit("pass"), FINISH)))).outcome is Outcome.UNRESOLVED
    around = world(FakeGenerator((FINISH,)))
    assert play(around).reward == 0.0 and around.grader.diffs[0].empty


def test_sampling_keys_count_turns():
    generator = FakeGenerator(SOLVE)
    play(world(generator))
    assert generator.keys == [SampleKey(7, INSTANCE.spec.instance_id, 2, 0, turn) for turn in range(3)]


def test_sampled_ids_are_kept_even_where_reencoding_would_merge_them():
    """T1: the same text from single bytes; a decode and encode would give other ids."""
    odd = [each for byte in view().removesuffix(END)[len(OPEN) :] for each in TOKENIZER.encode(byte)]
    turn = [TOKENIZER.special(OPEN), *odd[: -len("</tool_call>")], *ids(f"</tool_call>{END}")]
    assert turn != ids(view()) and TOKENIZER.decode(turn) == view()
    long = replace(COMPACT, turn_tokens=len(turn))
    made = play(world(FakeGenerator((turn, *SOLVE[1:])), harness=long))
    assert made.outcome is Outcome.RESOLVED
    first = made.turns[1]
    assert made.tokens[first.start : first.stop].tolist() == turn


def test_a_turn_that_did_not_stop_is_closed_outside_the_loss():
    """T4: the id that ends the turn was not sampled."""
    made = play(world(FakeGenerator((view().removesuffix(END), *SOLVE[1:]))))
    assert made.outcome is Outcome.RESOLVED
    closing = made.tokens[made.turns[2].start]
    assert closing == TOKENIZER.special(END) and not made.loss_mask[made.turns[2].start]
    stopped = play(world(FakeGenerator(SOLVE)))
    assert (
        stopped.tokens[stopped.turns[1].stop - 1] == closing and stopped.loss_mask[stopped.turns[1].stop - 1]
    )


def test_another_stop_id_counts_as_a_stop():
    """T5: ending with the second stop id is a clean finish."""
    made = play(world(FakeGenerator((*SOLVE[:2], FINISH.replace(END, "<|endoftext|>")))))
    assert made.outcome is Outcome.RESOLVED


def test_several_calls_in_a_turn_run_in_order_up_to_the_finish():
    turn = "\n".join(each.removesuffix(END) for each in (*SOLVE, edit("late", INSTANCE.repair.right))) + END
    around = world(FakeGenerator((turn,)), harness=replace(COMPACT, turn_tokens=200))
    made = play(around)
    assert made.outcome is Outcome.RESOLVED
    both = "\n".join(each.removesuffix(END) for each in SOLVE[:2]) + END
    made = play(world(FakeGenerator((both, FINISH))))
    assert made.outcome is Outcome.RESOLVED and text_of(made).count("<tool_response>") == 2


def test_a_turn_without_a_call_gets_an_error_and_may_recover():
    made = play(world(FakeGenerator(("hello" + END, *SOLVE))))
    assert made.outcome is Outcome.RESOLVED and NO_CALL in text_of(made)
    made = play(world(FakeGenerator((view().replace("</function>", ""), *SOLVE))))
    assert made.outcome is Outcome.RESOLVED and BAD_CALL in text_of(made)


def test_turns_without_calls_end_malformed():
    """T7: never a silent single-turn episode."""
    around = world(FakeGenerator((view(), '{"name": "finish"}' + END, "finish" + END)))
    made = play(around)
    assert (made.outcome, made.reward, made.detail) == (Outcome.MALFORMED, 0.0, NO_CALL)
    assert not around.grader.diffs and len(made.turns) == 6


def test_a_finish_in_an_ill_formed_turn_is_malformed():
    for turn in (FINISH.removesuffix(END), view().replace("</function>", "").removesuffix(END) + FINISH):
        made = play(world(FakeGenerator((*SOLVE[:2], turn))))
        assert (made.outcome, made.reward) == (Outcome.MALFORMED, 0.0)


def test_max_turns_and_its_malformed_twin():
    few = replace(COMPACT, max_turns=2)
    made = play(world(FakeGenerator((view(), view())), harness=few))
    assert (made.outcome, made.reward) == (Outcome.MAX_TURNS, 0.0)
    made = play(world(FakeGenerator((view(), "x" + END)), harness=few))
    assert made.outcome is Outcome.MALFORMED and made.detail == "ended as max_turns"


def test_unknown_tools_are_told_which_exist():
    made = play(world(FakeGenerator((view().replace("=view", "=cat"), *SOLVE))))
    assert "error: no tool cat; tools: view, str_replace, finish" in text_of(made)


def test_long_tool_output_is_clipped():
    small = replace(COMPACT, observation_chars=20)
    assert "characters cut]" in text_of(play(world(FakeGenerator(SOLVE), harness=small)))


def solved_length() -> int:
    return len(play(world(FakeGenerator(SOLVE))).tokens)


@pytest.mark.parametrize("unstopped", ["length", "context"])
def test_the_window_is_never_exceeded_and_truncation_is_not_a_parse_error(unstopped):
    """T8: the fake engine asserts prompt + max_tokens <= context in every case."""
    total = solved_length()
    for context in range(1, total + 1):  # also too small for the prompt
        generator = FakeGenerator(SOLVE, context=context, unstopped=unstopped)
        made = play(world(generator))
        assert made.outcome is (Outcome.RESOLVED if context == total else Outcome.CONTEXT_FULL), context
        assert len(made.tokens) <= context and made.reward == float(context == total)


def test_overlong_episodes_are_graded_where_no_finish_is_required():
    total = solved_length()
    free = replace(COMPACT, require_finish=False)
    for verdicts, outcome, reward in [
        ((), Outcome.CONTEXT_FULL, 1.0),
        (("unresolved",), Outcome.CONTEXT_FULL, 0.0),
        (("tampering",), Outcome.SUSPECTED_TAMPERING, 0.0),
        (("error",), Outcome.GRADER_ERROR, None),
    ]:
        made = play(world(FakeGenerator(SOLVE, context=total - 1), verdicts=verdicts, harness=free))
        assert (made.outcome, made.reward) == (outcome, reward)


@pytest.mark.parametrize(
    ("verdict", "outcome", "reward"),
    [
        ("resolved", Outcome.RESOLVED, 1.0),
        ("unresolved", Outcome.UNRESOLVED, 0.0),
        ("tampering", Outcome.SUSPECTED_TAMPERING, 0.0),
        ("timeout", Outcome.GRADER_TIMEOUT, None),
        ("error", Outcome.GRADER_ERROR, None),
        (SandboxError("grader gone"), Outcome.GRADER_ERROR, None),
    ],
)
def test_verdicts_become_outcomes(verdict, outcome, reward):
    made = play(world(FakeGenerator(SOLVE), verdicts=(verdict,)))
    assert (made.outcome, made.reward) == (outcome, reward)


@pytest.mark.parametrize("operation", ["create", "read", "diff"])
def test_sandbox_faults_are_infrastructure_errors(operation):
    provider = FakeProvider(operation)
    made = play(world(FakeGenerator(SOLVE), provider=provider))
    assert (made.outcome, made.reward, made.detail) == (Outcome.INFRA_ERROR, None, f"{operation} failed")


def test_agent_timeout_keeps_whole_turns_only():
    class Slow(FakeGenerator):
        async def wait(self, key):
            await asyncio.sleep(30 if key.turn == 1 else 0)

    hasty = replace(INSTANCE.spec, agent_timeout=0.1)
    made = play(world(Slow(SOLVE)), task=hasty)
    assert (made.outcome, made.reward) == (Outcome.AGENT_TIMEOUT, 0.0) and len(made.turns) == 2


def test_a_timeout_error_of_another_origin_is_not_the_agents():
    with pytest.raises(TimeoutError, match="engine"):
        play(world(FakeGenerator((TimeoutError("engine"),))))


def test_cancelled_generation():
    made = play(world(FakeGenerator((view().removesuffix(END),), unstopped="cancelled")))
    assert (made.outcome, made.reward) == (Outcome.CANCELLED, None)


def test_rules_are_data():
    strict = {
        **OUTCOME_RULES,
        Outcome.UNRESOLVED: OutcomeRule(reward=-1, trained=True, votes=True, retried=False),
    }
    assert play(world(FakeGenerator((FINISH,)), rules=strict)).reward == -1


def test_cancelling_an_episode_twice_still_destroys_its_sandbox():
    async def scenario():
        around = world(FakeGenerator(SOLVE, delay=0.02))
        episode = asyncio.create_task(
            run_episode(INSTANCE.spec, INSTANCE.hidden, attempt=ATTEMPT, world=around)
        )
        while not around.sandboxes.made:
            await asyncio.sleep(0.005)
        episode.cancel()
        await asyncio.sleep(0.001)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert around.sandboxes.alive == 0 and around.generator.sessions[0].closed

    asyncio.run(scenario())


def test_missing_tools_are_named():
    around = world(FakeGenerator(SOLVE))
    with pytest.raises(ValueError, match="finish"):
        replace(around, tools={"view": around.tools["view"], "str_replace": around.tools["str_replace"]})


def test_ragged_generations_are_refused():
    ragged = Generation(tokens=[1, 2], logprobs=[0.0], full_logprobs=[0.0], versions=[1], finish="stop")
    with pytest.raises(ValueError, match="per token"):
        Transcript().sample(ragged)


def _sampled(tokens, *, routed):
    values = [0.0] * len(tokens)
    routes = np.arange(2 * routed, dtype=np.int16).reshape(routed, 1, 2)
    return Generation(
        tokens=tokens,
        logprobs=values,
        full_logprobs=values,
        versions=[0] * len(tokens),
        finish="stop",
        routed_experts=routes,
    )


def _transcript(*turns) -> Transcript:
    made = Transcript()
    for given, sampled in turns:
        made.give(given, "prompt")
        made.sample(sampled)
    return made


def _ended(made: Transcript):
    return made.trajectory(
        "t", epoch=0, sample=0, outcome=Outcome.RESOLVED, reward=1.0, timings={}, detail=""
    )


def test_the_samplers_experts_are_those_of_every_token_but_the_last():
    turns = (([1, 2, 3], _sampled([4, 5], routed=4)), ([6], _sampled([7], routed=2)))
    routes = _ended(_transcript(*turns)).routed_experts
    assert routes is not None and routes.dtype == np.int16
    assert routes[:, 0, 0].tolist() == [0, 2, 4, 6, 0, 2, -1]


def test_an_episode_with_tokens_without_a_record_has_no_experts():
    assert _ended(_transcript(([1, 2], _sampled([3], routed=1)))).routed_experts is None
    assert _ended(_transcript()).routed_experts is None
