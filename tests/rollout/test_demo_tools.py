"""What demonstrations show as tool output is what the tools print."""

import asyncio
import random
from dataclasses import replace

from jaxrl.rollout.demos import STAGE_2, demonstrate
from jaxrl.rollout.harness import COMPACT
from sandbox.agent_tools.compact import compact_tools
from sandbox.tasks.generated.generate import instances
from tests.rollout.rollout_fakes import FakeProvider, FakeSandbox


def test_demonstrations_print_what_the_real_tools_print():
    tools = compact_tools()
    for instance in instances("train", 32, 6):
        made = demonstrate(instance, mix=replace(STAGE_2, retry=0.5), harness=COMPACT, rng=random.Random(9))
        sandbox = FakeSandbox(FakeProvider(), {"app.py": instance.repair.source.encode()}, {})
        for turn, result in zip(made[1:-1:2], made[2::2], strict=True):
            (call,) = turn.calls
            seen = asyncio.run(tools[call.name].run(sandbox, call.arguments))
            assert seen.text == result.content and not seen.finished
        assert asyncio.run(tools["finish"].run(sandbox, {})).finished
