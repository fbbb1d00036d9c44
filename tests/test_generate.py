"""`python -m jaxrl.generate` on a tiny random model; greedy text against a loop over the training forward."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl import generate
from jaxrl.config import load, to_yaml
from jaxrl.model.hub import load_hub, save_hub
from jaxrl.model.presets import PRESETS
from jaxrl.model.transformer import Transformer
from jaxrl.rl.checkpoint import CheckpointStore
from jaxrl.rollout.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "configs" / "quickstart" / "tokenizer.json"
PROMPT = "def grüße():"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint in hub layout with its tokenizer."""
    path = tmp_path_factory.mktemp("hub")
    layers = ("linear_attention", "full_attention")
    save_hub(Transformer(replace(PRESETS["quickstart"], layer_types=layers), rngs=nnx.Rngs(0)), path)
    (path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


def greedy_text(folder: Path, ids: list[int], count: int, tokenizer: Tokenizer) -> str:
    graph, state = nnx.split(load_hub(folder))

    @jax.jit
    def best(state, tokens_BT, real_BT):
        model, positions_BT = nnx.merge(graph, state), jnp.arange(tokens_BT.shape[1])[None]
        hidden_BTD = model(tokens_BT, segment_ids_BT=real_BT, positions_BT=positions_BT)
        return jnp.argmax(model.logits(hidden_BTD[0]), axis=-1)

    made = list(ids)
    for _ in range(count):
        tokens_BT, real_BT = np.zeros((2, 1, 64), np.int32)
        tokens_BT[0, : len(made)], real_BT[0, : len(made)] = made, 1
        made.append(int(best(state, tokens_BT, real_BT)[len(made) - 1]))
    assert not {tokenizer.special(stop) for stop in generate.STOPS} & set(made[len(ids) :])
    return tokenizer.decode(made[len(ids) :])


def printed(capsys, *arguments: str) -> tuple[str, str]:
    generate.main(list(arguments))
    return capsys.readouterr()


def test_greedy_text_is_that_of_the_forward(folder, tokenizer, capsys):
    out, err = printed(capsys, str(folder), PROMPT, "--temperature", "0", "--max-tokens", "20")
    assert out == greedy_text(folder, tokenizer.encode(PROMPT), 20, tokenizer) + "\n"
    pattern = (
        r"prompt \d+ tokens; 20 tokens sampled, the first after .* s.*, then .* tokens/s; ended by length\n"
    )
    assert re.fullmatch(pattern, err)


def test_chat_wraps_the_message_and_keeps_its_markup_plain(tokenizer):
    ids = generate.prompt_ids(tokenizer, "a<|im_end|>b", chat=True)
    assert tokenizer.decode(ids) == ("<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n")
    end = tokenizer.special("<|im_end|>")
    assert ids.count(end) == 1
    assert generate.prompt_ids(tokenizer, "a<|im_end|>b", chat=False).count(end) == 1


def test_samples_differ_stdin_is_read_and_a_seed_repeats_them(folder, capsys, monkeypatch):
    arguments = (str(folder), "-", "-n", "3", "--max-tokens", "12", "--seed", "4")
    seen = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n"))
        out, err = printed(capsys, *arguments)
        assert re.search(r"ended by (length \(\d\)|stop \(\d\)|length \(\d\), stop \(\d\))\n$", err)
        seen.append(out)
    samples = re.split(r"^\[\d/3\]\n", seen[0], flags=re.MULTILINE)[1:]
    assert len(set(samples)) == 3
    assert seen[0] == seen[1]
    assert seen[0] != printed(capsys, str(folder), PROMPT, *arguments[2:-1], "5")[0]


def test_a_stop_string_ends_the_text_before_it(folder, capsys):
    whole = printed(capsys, str(folder), PROMPT, "--temperature", "0", "--max-tokens", "20")[0]
    stop = whole[9:12]
    out, err = printed(
        capsys,
        str(folder),
        PROMPT,
        "--temperature",
        "0",
        "--max-tokens",
        "20",
        "--stop",
        stop,
        "--stop",
        "~~~",
    )
    assert out == whole[: whole.index(stop)] + "\n"
    assert err.endswith("ended by stop\n")


def test_a_full_context_ends_the_text(folder, tokenizer, capsys):
    length = len(tokenizer.encode(PROMPT)) + 3
    _, err = printed(capsys, str(folder), PROMPT, "--temperature", "0", "--context", str(length))
    assert "3 tokens sampled" in err and err.endswith("ended by context\n")


@pytest.fixture
def run(tmp_path, folder) -> Path:
    """A run of jaxrl.train that has saved two checkpoints."""
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(load(None, [f"model.checkpoint={folder}"])))
    _, params, rest = nnx.split(load_hub(folder), nnx.Param, ...)
    store = CheckpointStore(path / "checkpoints", report=print)
    for step in (1, 2):
        trained = jax.tree.map(lambda leaf, step=step: leaf + step, params)
        store.save({"params": trained, "rest": rest}, step=step, version=step, progress={})
    return path


def test_of_a_run_the_newest_checkpoint_is_taken(run, folder, capsys):
    before, after = (nnx.state(each) for each in (load_hub(folder), generate.load_model(run)))
    assert capsys.readouterr().err == f"{run}: step 2\n"
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((b == a + 2).all()), before, after)))
    assert generate.find_tokenizer(run, None).samefile(TOKENIZER)


def test_a_run_without_checkpoints_says_so(run, capsys):
    for path in (run / "checkpoints").iterdir():
        path.rename(run / path.name)
    message = refusal(capsys, str(run), PROMPT)
    assert message.endswith("expected a checkpoint, but the run has not written one yet")


def test_the_tokenizer_of_an_exported_model_is_its_runs(run, folder):
    (run / "model").symlink_to(folder)
    export = run.parent / "other" / "model"
    export.mkdir(parents=True)
    (export.parent / "config.yaml").write_text((run / "config.yaml").read_text())
    assert generate.find_tokenizer(export, None).samefile(TOKENIZER)
    assert generate.find_tokenizer(export, folder / "tokenizer.json") == folder / "tokenizer.json"


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        generate.main(list(arguments))
    assert capsys.readouterr().out.strip() == ""
    return str(ended.value.code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all", "x"], "/nowhere/at/all: expected the folder of a model or of a run, found none"),
        (["HUB", ""], "empty prompt: expected at least one character"),
        (["HUB", "x", "--context", "1"], "prompt of 1 tokens: expected fewer than the context of 1;"),
        (["HUB", "x", "--tokenizer", "no.json"], "no tokenizer: expected one of no.json;"),
        (["HUB", "x", "--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["HUB", "x", "--top-p", "0"], "--top-p 0.0: expected above 0, at most 1"),
        (["HUB", "x", "--top-k", "-2"], "--top-k -2: expected 0 or more"),
        (["HUB", "x", "--min-p", "1"], "--min-p 1.0: expected 0 or more, below 1"),
        (["HUB", "x", "--temperature", "nan"], "--temperature nan: expected 0 or more"),
        (["HUB", "x", "--stop", ""], "--stop '': expected a text that is not empty"),
    ],
)
def test_wrong_arguments_are_one_line(folder, capsys, arguments, message):
    given = [str(folder) if each == "HUB" else each for each in arguments]
    said = refusal(capsys, *given)
    assert said.startswith(f"python -m jaxrl.generate: {message}") and "\n" not in said


def test_damaged_checkpoints_and_foreign_tokenizers_are_one_line(folder, tmp_path, capsys):
    path = tmp_path / "hub"
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refusal(capsys, str(path), "x")
    (path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    assert "expected config.json and model.safetensors" in refusal(capsys, str(path), "x")
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    said = refusal(capsys, str(path), "x")
    assert str(path) in said and "\n" not in said


def test_numbers_below_one_are_refused_by_the_parser(folder, capsys):
    for option in ("-n", "--max-tokens", "--context"):
        with pytest.raises(SystemExit) as ended:
            generate.main([str(folder), "x", option, "0"])
        assert ended.value.code == 2
        assert f"argument {option}: expected at least 1, got 0" in capsys.readouterr().err


def test_help_is_short_and_names_every_option():
    text = generate.parser().format_help()
    assert len(text.splitlines()) < 35 and all(len(line) <= 100 for line in text.splitlines())
    for option in ("--chat", "--stop", "--seed", "--top-p", "--min-p", "--tokenizer", "PROMPT", "stdin"):
        assert option in text


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(folder):
    command = [sys.executable, "-m", "jaxrl.generate", str(folder), PROMPT, "--max-tokens", "400"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_weights_that_are_no_numbers_are_one_line(folder, tmp_path, capsys):
    model = load_hub(folder)
    graph, state = nnx.split(model)
    save_hub(nnx.merge(graph, jax.tree.map(lambda leaf: leaf * jnp.nan, state)), tmp_path / "nan")
    said = refusal(capsys, str(tmp_path / "nan"), "x", "--tokenizer", str(TOKENIZER))
    assert "non-finite" in said and "\n" not in said
