"""Checks of a published weight file."""

import json
import math
import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.weights import (
    TensorInfo,
    WeightFileError,
    check_content,
    check_tensors,
    confine,
    model_shapes,
    narrow,
    read_header,
)

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text("abc.", min_size=1, max_size=6)
models = st.dictionaries(names, st.tuples(st.sampled_from(["F32", "BF16", "F16"]), shapes), max_size=5)


def file_bytes(tensors, *, gap=0, meta=True):
    header, at = ({"__metadata__": {"format": "pt"}} if meta else {}), 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at + gap, at + gap + size]}
        at += size + gap
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


@given(models)
def test_a_complete_file_gives_names_dtypes_and_shapes(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    path.write_bytes(file_bytes(tensors))
    assert read_header(path) == {name: TensorInfo(*info) for name, info in tensors.items()}


@given(models.filter(lambda m: sum(math.prod(s) for _, s in m.values()) > 0), st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, tensors, data):
    whole = file_bytes(tensors)
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(WeightFileError):
        read_header(path)


@given(st.binary(max_size=64))
def test_noise_is_refused_and_not_a_crash(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    path.write_bytes(noise)
    with pytest.raises(WeightFileError):
        read_header(path)


@pytest.mark.parametrize(
    "data",
    [
        file_bytes({"a": ("F32", (2,)), "b": ("F32", (2,))}, gap=4),
        file_bytes({"a": ("F32", (2,))}) + b"x",
        file_bytes({"a": ("I64", (2,))}),
        (10).to_bytes(8, "little") + b'["a", "b"]',
    ],
    ids=["gap", "tail", "integers", "list"],
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(WeightFileError, match=r"a\.safetensors"):
        read_header(tmp_path / "a.safetensors")


def test_only_files_below_the_store_are_taken(tmp_path):
    store, outside = tmp_path / "store", tmp_path / "outside.safetensors"
    (store / "sub").mkdir(parents=True)
    outside.touch()
    for name in ("1.safetensors", "sub/2.safetensors"):
        (store / name).touch()
        assert confine(store, name) == store / name
        assert confine(store, str(store / name)) == store / name
    (store / "link.safetensors").symlink_to(outside)
    for name in ("../outside.safetensors", str(outside), "link.safetensors", ".", "", "sub/../../outside.safetensors"):
        with pytest.raises(WeightFileError, match="outside the weight store"):
            confine(store, name)
    with pytest.raises(WeightFileError, match="does not exist"):
        confine(store, "sub")


def test_a_client_may_narrow_the_store_but_not_widen_it(tmp_path):
    (tmp_path / "store" / "run").mkdir(parents=True)
    store = tmp_path / "store"
    assert narrow(store, None) == store
    assert narrow(store, str(store)) == store
    assert narrow(store, str(store / "run")) == store / "run"
    for wider in ("/", str(tmp_path), str(tmp_path / "store2"), str(store / ".." / "other")):
        with pytest.raises(WeightFileError, match="outside"):
            narrow(store, wider)


def test_size_and_digest_are_compared(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(os.urandom(1000))
    digest = blake3(path.read_bytes()).hexdigest()
    check_content(path, 1000, digest.upper())
    check_content(path, None, None)
    with pytest.raises(WeightFileError, match="1000 bytes, expected 999"):
        check_content(path, 999, digest)
    with pytest.raises(WeightFileError, match="corrupt"):
        check_content(path, 1000, digest[:-1] + ("0" if digest[-1] != "0" else "1"))


def info(shape):
    return TensorInfo("F32", shape)


def test_a_file_must_hold_the_whole_model_and_nothing_else():
    expected = {"a": (2, 3), "b": (4,)}
    check_tensors({"a": info((2, 3)), "b": info((4,))}, expected, tied=False)
    with pytest.raises(WeightFileError, match="lacks b"):
        check_tensors({"a": info((2, 3))}, expected, tied=False)
    with pytest.raises(WeightFileError, match="unknown c"):
        check_tensors({"a": info((2, 3)), "b": info((4,)), "c": info(())}, expected, tied=False)
    with pytest.raises(WeightFileError, match="another shape for a"):
        check_tensors({"a": info((3, 2)), "b": info((4,))}, expected, tied=False)
    with pytest.raises(WeightFileError, match=r"lacks a0, a1, a2 and 7 more"):
        check_tensors({}, {f"a{n}": () for n in range(10)}, tied=False)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_model", [True, False])
def test_a_tied_head_may_be_left_out_or_given(in_file, in_model):
    head = {"lm_head.weight": (2,)}
    found = {"a": info((1,)), **({"lm_head.weight": info((2,))} if in_file else {})}
    expected = {"a": (1,), **(head if in_model else {})}
    check_tensors(found, expected, tied=True)
    if in_file != in_model:
        with pytest.raises(WeightFileError):
            check_tensors(found, expected, tied=False)


def test_the_shapes_of_a_model_are_those_of_all_its_shards(tmp_path: Path):
    (tmp_path / "model-1.safetensors").write_bytes(file_bytes({"a": ("F32", (2,))}))
    (tmp_path / "model-2.safetensors").write_bytes(file_bytes({"b": ("BF16", (3, 1))}))
    assert model_shapes(tmp_path) == {"a": (2,), "b": (3, 1)}
    assert model_shapes(tmp_path / "absent") is None
