"""JetStream's own orchestrator drives our engine: `make jetstream`, in an environment that has it."""

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxrl.contracts import SampleKey, Sampling
from jaxrl.engine.engine import Engine, EngineOptions
from jaxrl.engine.slots import SlotOptions
from jaxrl.model.hub import load_hub
from jaxrl.model.transformer import Transformer

with warnings.catch_warnings():  # of what JetStream imports
    warnings.simplefilter("ignore")
    import grpc  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    import portpicker  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    from jetstream.core import config_lib, orchestrator, server_lib  # pyright: ignore[reportMissingImports]
    from jetstream.core.proto import (  # pyright: ignore[reportMissingImports]
        jetstream_pb2,
        jetstream_pb2_grpc,
    )
    from jetstream.engine import engine_api, tokenizer_api  # pyright: ignore[reportMissingImports]

    from jaxrl.engine.jetstream import NO_BOS, JetStreamEngine, JetStreamTokenizer

logging.getLogger().removeHandler(orchestrator.handler)  # it logs everything of every library to stdout
logging.getLogger().setLevel(logging.WARNING)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
TOKENIZER = QUICKSTART / "tokenizer.json"
OPTIONS = SlotOptions(slots=8, context=320, prefill_length=256)
NEW_TOKENS = 24
REQUESTS = 50


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_hub(QUICKSTART / "start")


@pytest.fixture(scope="module")
def engine(model) -> JetStreamEngine:
    return JetStreamEngine(model, TOKENIZER, OPTIONS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pieces of the tests themselves, 1 to 255 tokens."""
    text = Path(__file__).read_text()
    ids = JetStreamTokenizer(TOKENIZER).encode(text, max_prefill_length=32768)[0].tolist()
    rng = np.random.default_rng(0)
    lengths = [1, 2, 16, 17, 255, *rng.integers(1, 256, REQUESTS - 5).tolist()]
    return [ids[start : start + n] for n in lengths for start in [int(rng.integers(0, 1000))]]


@pytest.fixture(scope="module")
def direct(model, prompts) -> list[list[int]]:
    """Greedy tokens by the direct API, without the stop id."""
    stops = sorted(JetStreamTokenizer(TOKENIZER).stop_tokens)

    async def ask(engine: Engine, number: int) -> list[int]:
        session = engine.open_session()
        out = await session.generate(
            prompts[number],
            key=SampleKey(0, "greedy", 0, number, 0),
            sampling=Sampling(temperature=0),
            max_tokens=NEW_TOKENS,
            stop_ids=stops,
        )
        session.close()
        return list(out.tokens[:-1] if out.finish == "stop" else out.tokens)

    async def everything() -> list[list[int]]:
        async with Engine(model, EngineOptions(slots=8, context=OPTIONS.context)) as engine:
            return await asyncio.gather(*(ask(engine, number) for number in range(len(prompts))))

    return asyncio.run(everything())


@asynccontextmanager
async def orchestrated(
    prefill: JetStreamEngine, generate: JetStreamEngine, *, interleaved: bool
) -> AsyncIterator:
    """JetStream's servicer over its driver, whose threads are gone at the end."""
    driver = orchestrator.Driver(
        prefill_engines=[prefill],
        generate_engines=[generate],
        prefill_params=[prefill.load_params()],
        generate_params=[generate.load_params()],
        interleaved_mode=interleaved,
    )
    try:
        yield orchestrator.LLMOrchestrator(driver=driver)
    finally:
        await asyncio.to_thread(driver.stop)


def ids_request(tokens: list[int], max_tokens: int = NEW_TOKENS):
    content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)
    return jetstream_pb2.DecodeRequest(token_content=content, max_tokens=max_tokens)


async def answer(client, request) -> tuple[list[int], str]:
    """Ids and text of the whole stream."""
    ids: list[int] = []
    text: list[str] = []
    async for part in client.Decode(request):
        (sample,) = part.stream_content.samples
        ids += sample.token_ids
        text.append(sample.text)
    return ids, "".join(text)


def test_it_is_the_published_interface(engine):
    assert isinstance(engine, engine_api.Engine) and not JetStreamEngine.__abstractmethods__
    assert isinstance(engine.build_tokenizer(engine.get_tokenizer()), tokenizer_api.Tokenizer)
    assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length) == (8, 1, 256)
    assert engine.mesh.size == 1 and engine.get_prefix_destination_sharding().is_fully_replicated
    assert all(device.platform == "cpu" for device in engine.colocated_cpus)


async def test_fifty_requests_at_once_get_the_tokens_of_the_direct_api(engine, prompts, direct):
    async with orchestrated(engine, engine, interleaved=True) as client:
        answers = await asyncio.gather(*(answer(client, ids_request(prompt)) for prompt in prompts))
    assert [ids for ids, _ in answers] == direct
    assert len(direct) == REQUESTS
    assert {len(tokens) == NEW_TOKENS for tokens in direct} == {True, False}  # some stopped by themselves


async def test_prefill_and_generate_engines_may_be_two(model, engine, prompts, direct):
    prefiller = JetStreamEngine(model, TOKENIZER, OPTIONS)
    async with orchestrated(prefiller, engine, interleaved=False) as client:
        answers = await asyncio.gather(*(answer(client, ids_request(prompt)) for prompt in prompts[:10]))
    assert [ids for ids, _ in answers] == direct[:10]


def test_its_server_serves_the_engine_over_grpc(engine, prompts, direct):
    config = config_lib.ServerConfig(
        interleaved_slices=("cpu=1",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    port = portpicker.pick_unused_port()
    server = server_lib.run(port, config, devices=server_lib.get_devices())
    try:
        with grpc.insecure_channel(f"localhost:{port}") as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            parts = list(stub.Decode(ids_request(prompts[3])))
    finally:
        server.stop()
    assert [token for part in parts for token in part.stream_content.samples[0].token_ids] == direct[3]


async def test_text_in_and_text_out(engine, prompts):
    tokenizer = JetStreamTokenizer(TOKENIZER)
    text = "def grüße(名):\n    return 名"
    content = jetstream_pb2.DecodeRequest.TextContent(text=text)
    request = jetstream_pb2.DecodeRequest(text_content=content, max_tokens=NEW_TOKENS)
    ids, length = tokenizer.encode(text)
    async with orchestrated(engine, engine, interleaved=True) as client:
        by_text = await answer(client, request)
        by_ids = await answer(client, ids_request(ids[:length].tolist()))
    assert by_text[0] == by_ids[0] and by_text[0]
    assert by_text[1] == tokenizer.decode(by_text[0])


async def test_requests_that_cannot_be_served_end_empty_and_harm_nobody(engine, prompts, direct, caplog):
    async with orchestrated(engine, engine, interleaved=True) as client:
        jobs = [ids_request([10**6]), ids_request([]), *map(ids_request, prompts[:6])]
        answers = await asyncio.gather(*(answer(client, job) for job in jobs))
    assert [ids for ids, _ in answers] == [[], [], *direct[:6]]
    refusals = [record.getMessage() for record in caplog.records if record.name == "jaxrl.engine.jetstream"]
    assert sorted(text.partition(":")[2][:28] for text in refusals) == [
        " expected at least one token",
        " expected token ids of 0..76",
    ]


async def test_the_last_tokens_of_a_long_prompt_are_kept(engine, prompts):
    long = (prompts[4] * 2)[:400]
    async with orchestrated(engine, engine, interleaved=True) as client:
        whole, last = await asyncio.gather(
            answer(client, ids_request(long)), answer(client, ids_request(long[-256:]))
        )
    assert whole == last and whole[0]


async def test_a_full_context_ends_an_answer(engine, prompts):
    async with orchestrated(engine, engine, interleaved=True) as client:
        prompt = (prompts[4] * 2)[:256]
        ids, _ = await answer(client, ids_request(prompt, max_tokens=1000))
    assert len(ids) <= OPTIONS.context - 256


def test_one_prefix_into_many_slots_and_freed_slots(engine, prompts):
    params = engine.load_params()
    padded, length = np.array([NO_BOS, *prompts[2], 0, 0]), len(prompts[2]) + 1
    prefix = engine.prefill(params=params, padded_tokens=padded, true_length=length)
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [1, 2, 5])
    engine.free_resource(2)
    engine.free_resource(5)
    state = engine.insert(prefix, state, 5)
    state, result = engine.generate(params, state)
    slots = [result.convert_to_numpy().get_result_at_slot(slot) for slot in range(8)]
    assert [bool(slot.valid) for slot in slots] == [False, True, False, False, False, True, False, False]
    assert slots[1].tokens == slots[5].tokens and slots[1].lengths == 1


def test_a_prefix_goes_on_from_an_earlier_one(engine, prompts):
    params, tokens = engine.load_params(), np.array(prompts[4][:40])
    whole = engine.prefill(params=params, padded_tokens=tokens, true_length=40)
    first = engine.prefill(params=params, padded_tokens=tokens[:24], true_length=24)
    more = engine.prefill(params=params, padded_tokens=tokens[24:], true_length=16, existing_prefix=first)
    state = engine.insert(more, engine.insert(whole, engine.init_decode_state(), 0), 1)
    for _ in range(8):
        state, result = engine.generate(params, state)
        data = result.convert_to_numpy()
        assert data.get_result_at_slot(0).tokens == data.get_result_at_slot(1).tokens


def test_every_byte_of_a_split_character_is_joined_by_jetstream(engine):
    from jetstream.engine import token_utils  # pyright: ignore[reportMissingImports]

    tokenizer = JetStreamTokenizer(TOKENIZER)
    text = "grün 名前 🙂 a\n"
    ids, length = tokenizer.encode(text)
    pieces = [tokenizer.decode([token]) for token in ids[:length].tolist()]
    assert any(token_utils.is_byte_token(piece) for piece in pieces)
    assert token_utils.text_tokens_to_str(pieces) == text


def test_sizes_that_jetstream_does_not_pad_to_are_refused(model):
    with pytest.raises(ValueError, match="prefill_length to be one of JetStream's paddings"):
        JetStreamEngine(model, TOKENIZER, SlotOptions(prefill_length=100))
