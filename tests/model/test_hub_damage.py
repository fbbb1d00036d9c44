"""Damaged hub repositories: one error that names file, tensor, expected and got, before any data is read."""

import json
import re

import hub_cases
import numpy as np
import pytest
from hub_cases import PREFIX, write
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.model.hub import HubError, load_hub

NORM = f"{PREFIX}norm.weight"
QKV = f"{PREFIX}layers.0.linear_attn.in_proj_qkv.weight"
GATE_UP = f"{PREFIX}layers.0.mlp.experts.gate_up_proj"
EXPERT = f"{PREFIX}layers.1.mlp.experts.3.down_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def no_data_is_read(monkeypatch):
    def read(entry):
        raise AssertionError(f"{entry.name} was read before the check was over")

    monkeypatch.setattr("jaxrl.model.hub_files.Entry.map", read)


def tensors(*, one_by_one: bool = False) -> hub_cases.Tensors:
    found = hub_cases.text_tensors(moe=True, tied=False, seed=0)
    found = hub_cases.one_by_one(found) if one_by_one else found
    return found | hub_cases.carried_tensors(fused=False, seed=0)


def source(directory, found, **options):
    return write(directory, found, hub_cases.config(moe=True, tied=False), **options)


def refused(directory, *parts: str) -> str:
    """The message of the one error, which must hold all parts."""
    with pytest.raises(HubError) as caught:
        load_hub(directory)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    return message


@pytest.mark.parametrize("files", [1, 2])
def test_missing(tmp_path, files):
    found = tensors()
    del found[NORM]
    where = "model.safetensors" if files == 1 else INDEX
    refused(source(tmp_path, found, files=files), f"{where}: tensor {NORM}: expected it", "no such tensor")


def test_missing_expert(tmp_path):
    found = tensors(one_by_one=True)
    del found[EXPERT]
    refused(source(tmp_path, found), f"model.safetensors: tensor {EXPERT}: expected it", "no such tensor")


def test_misnamed(tmp_path):
    found = tensors()
    found[f"{PREFIX}norm.wieght"] = found.pop(NORM)
    refused(source(tmp_path, found), f"tensor {NORM}: expected it", f"but an unknown {PREFIX}norm.wieght")


def test_unknown(tmp_path):
    found = tensors() | {f"{PREFIX}layers.2.input_layernorm.weight": np.zeros(16, np.float32)}
    refused(source(tmp_path, found), "model.safetensors: tensor", "layers.2.", "expected only tensors")


def test_head_of_a_tied_model(tmp_path):
    write(tmp_path, tensors(), hub_cases.config(moe=True, tied=True))
    refused(tmp_path, "tensor lm_head.weight", "config.json says the head is tied")


@pytest.mark.parametrize(
    ("name", "value", "expected", "got"),
    [
        (QKV, np.zeros((16, 20), hub_cases.ml_dtypes.bfloat16), "shape (20, 16)", "(16, 20)"),
        (GATE_UP, np.zeros((4, 8, 16), hub_cases.ml_dtypes.bfloat16), "shape (4, 16, 16)", "(4, 8, 16)"),
        (QKV, np.zeros((20, 16), np.float16), "dtype BF16", "F16"),
        (QKV, np.zeros((20, 16), np.float32), "dtype BF16", "F32"),
        (f"{PREFIX}layers.0.linear_attn.A_log", np.zeros(2, np.float16), "dtype F32 or BF16", "F16"),
    ],
)
def test_wrong_shape_or_dtype(tmp_path, name, value, expected, got):
    at = source(tmp_path, tensors() | {name: value})
    refused(at, f"model.safetensors: tensor {name}: expected {expected}", f"got {got}")


def test_wrong_shape_of_an_expert(tmp_path):
    found = tensors(one_by_one=True)
    found[EXPERT] = np.ascontiguousarray(found[EXPERT].T)
    refused(source(tmp_path, found), f"tensor {EXPERT}: expected shape (16, 8); got (8, 16)")


def test_both_expert_layouts_at_once(tmp_path):
    found = hub_cases.one_by_one(tensors()) | tensors()
    refused(source(tmp_path, found), ".experts.0.down_proj.weight: expected only tensors", "more")


def test_quantised_experts(tmp_path):
    found = tensors(one_by_one=True)
    found[f"{EXPERT}_scale_inv"] = np.zeros((1, 1), np.float32)
    refused(source(tmp_path, found), f"tensor {EXPERT}_scale_inv: expected only tensors")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere(tmp_path_factory, share):
    at = source(tmp_path_factory.mktemp("cut"), tensors()) / "model.safetensors"
    whole = at.read_bytes()
    at.write_bytes(whole[: int(len(whole) * share)])
    message = refused(at.parent, str(at), "expected", "got")
    if int(len(whole) * share) >= 8 + int.from_bytes(whole[:8], "little"):
        assert re.search(r"tensor \S+: expected data up to byte \d+; got a truncated file of", message)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(tmp_path_factory, place, byte):
    at = source(tmp_path_factory.mktemp("flip"), tensors()) / "model.safetensors"
    whole = bytearray(at.read_bytes())
    spot = int((8 + int.from_bytes(whole[:8], "little")) * place)
    whole[spot] = byte
    at.write_bytes(whole)
    with pytest.raises((HubError, AssertionError)) as caught:
        load_hub(at.parent)
    assert isinstance(caught.value, HubError) is (str(at) in str(caught.value))


def test_bytes_after_the_end(tmp_path):
    at = source(tmp_path, tensors()) / "model.safetensors"
    size = at.stat().st_size
    at.write_bytes(at.read_bytes() + b"\0")
    refused(tmp_path, f"{at}: expected {size} bytes; got {size + 1}")


def rewrite_header(at, change) -> None:
    whole = at.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    change(header)
    text = json.dumps(header).encode()
    at.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda info: info.update(shape=[17]), "expected 34 bytes for BF16 (17,); got 32"),
        (lambda info: info.update(dtype="Q9"), "expected a dtype among"),
        (lambda info: info.update(shape=[-16]), "expected sizes of at least 0; got (-16,)"),
        (
            lambda info: info.update(data_offsets=[o + 2 for o in info["data_offsets"]]),
            "expected data at byte",
        ),
    ],
)
def test_header_that_contradicts_itself(tmp_path, change, expected):
    at = source(tmp_path, tensors()) / "model.safetensors"
    rewrite_header(at, lambda header: change(header[NORM]))
    refused(tmp_path, str(at), expected, "got")


def test_shard_missing(tmp_path):
    found = tensors()
    (source(tmp_path, found, files=2) / "shard-1.safetensors").unlink()
    refused(tmp_path, f"{tmp_path / 'shard-1.safetensors'}: tensor {sorted(found)[1]}", "got no such file")


@pytest.mark.parametrize("place", ["shard-0.safetensors", None])
def test_index_that_is_wrong_about_a_tensor(tmp_path, place):
    found = tensors()
    index = source(tmp_path, found, files=2) / INDEX
    settings = json.loads(index.read_text())
    name = sorted(found)[1]
    settings["weight_map"] |= {name: place}
    if place is None:
        del settings["weight_map"][name]
    index.write_text(json.dumps(settings))
    refused(tmp_path, f"shard-1.safetensors: tensor {name}: expected only", f"got one placed in {place}")


def test_index_that_lists_too_much(tmp_path):
    index = source(tmp_path, tensors(), files=2) / INDEX
    settings = json.loads(index.read_text())
    settings["weight_map"]["ghost"] = "shard-0.safetensors"
    index.write_text(json.dumps(settings))
    refused(tmp_path, "shard-0.safetensors: tensor ghost: expected the tensor", "got a file without it")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_index_that_is_not_one(tmp_path, text):
    (source(tmp_path, tensors(), files=2) / INDEX).write_text(text)
    refused(tmp_path, INDEX, "expected JSON with a weight_map")


def test_single_file_beside_an_index(tmp_path):
    source(tmp_path, tensors(), files=2)
    source(tmp_path, tensors())
    refused(tmp_path, "expected either model.safetensors or", "got both")


def test_config(tmp_path):
    source(tmp_path, tensors())
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text("{")
    refused(tmp_path, f"{file}: expected JSON")
    file.write_text("3")
    refused(tmp_path, f"{file}: expected a JSON object")
    del settings["text_config"]["rope_parameters"]
    file.write_text(json.dumps(settings))
    refused(tmp_path, f"{file}: expected the key 'rope_parameters'")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_hub(tmp_path)
    source(tmp_path, tensors())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or"):
        load_hub(tmp_path)
