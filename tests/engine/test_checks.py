"""What can't be done is refused before anything changes, with what was expected."""

import pytest

from jaxrl.contracts import SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineError, EngineOptions
from tests.engine.conftest import ask, run

KEY = SampleKey(7, "t", 0, 0, 0)


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        ([], {}, "empty prompt"),
        ([64], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([7.5], {}, "expected integers"),
        (["7"], {}, "expected integers"),
        (None, {}, "tokens: expected a list of token ids, got NoneType"),
        ((t for t in [7]), {}, "tokens: expected a list of token ids, got generator"),
        ("7", {}, "tokens: expected a list of token ids, got str"),
        ([7], {"max_tokens": 2.5}, "max_tokens = 2.5: expected an integer"),
        ([7], {"max_tokens": float("nan")}, "max_tokens = nan"),
        ([7], {"max_tokens": "3"}, "max_tokens = '3'"),
        ([7], {"stop_ids": None}, "stop_ids: expected a list"),
        ([7], {"stop_strings": "ab"}, "expected a list of strings"),
        ([7], {"stop_strings": [5]}, "non-empty strings, got 5"),
        ([7], {"top_logprobs": 1.5}, "top_logprobs = 1.5"),
        ([7], {"sampling": 5}, "expected a contracts.Sampling"),
        ([7], {"sampling": Sampling(top_k=2**40)}, "top_k"),
        ([7], {"sampling": Sampling(temperature=float("inf"))}, "temperature = inf: expected 0 .greedy. or"),
        ([7], {"sampling": Sampling(temperature=2e-38)}, "temperature"),
        ([7], {"key": 5}, "key: expected a contracts.SampleKey"),
        ([7], {"key": SampleKey(0.5, "t", 0, 0, 0)}, "key.seed"),  # type: ignore[arg-type]
        ([7], {"key": SampleKey(0, "\udc80", 0, 0, 0)}, "UTF-8"),
        ([7], {"max_tokens": 0}, "max_tokens"),
        ([7], {"stop_ids": range(9)}, "stop ids"),
        ([7], {"stop_ids": [64]}, "stop_ids: 64"),
        ([7], {"stop_strings": [""]}, "non-empty"),
        ([7], {"top_logprobs": 4}, "records 3"),
        ([7], {"sampling": Sampling(temperature=-1)}, "temperature"),
        ([7], {"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ([7], {"sampling": Sampling(top_p=0)}, "top_p"),
        ([7], {"sampling": Sampling(top_k=-1)}, "top_k"),
        ([7], {"sampling": Sampling(min_p=1.5)}, "min_p"),
    ],
)
def test_bad_requests_say_why_and_leave_the_engine_alive(engine, tokens, options, message):
    async def work(engine: Engine):
        session = engine.open_session()
        with pytest.raises(EngineError, match=message):
            settings = {"key": KEY, "sampling": Sampling(), "max_tokens": 2} | options
            await session.generate(tokens, **settings)
        assert session.length == 0
        return await ask(session, [9])

    assert len(run(engine, work).tokens) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slots": 0}, "slots = 0"),
        ({"parked": 0}, "parked = 0"),
        ({"prefill_buckets": (16, 4)}, "prefill_buckets"),
        ({"prefill_buckets": ()}, "prefill_buckets"),
        ({"eviction": "never"}, "eviction"),
        ({"host_bytes": -1}, "host_bytes"),
        ({"host_bytes": float("nan")}, "host_bytes"),
        ({"prefill_buckets": (16.5,)}, "prefill_buckets = 16.5"),
        ({"slots": 2.5}, "slots = 2.5"),
        ({"context": None}, "context = None"),
        ({"decode_steps": True}, "decode_steps = True"),
        ({"top_logprobs": 65}, "vocabulary"),
    ],
)
def test_bad_options_say_which(model, options, message):
    with pytest.raises(EngineError, match=message):
        Engine(model, EngineOptions(**options))
