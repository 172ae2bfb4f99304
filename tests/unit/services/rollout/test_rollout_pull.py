"""Fetching a weight file, as far as it needs no server: what is refused before anything is sent, and what is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from services.rollout import pull
from services.rollout.weights import WeightFileError

DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("http://trainer:80/weights", "http://trainer:80/weights"),
        ("http://trainer", "http://trainer:4711/weights"),
        ("http://other http://127.0.0.1:9", "http://127.0.0.1:9/weights/"),
    ],
)
def test_a_server_that_was_named_at_the_start_is_a_source(monkeypatch, allowed, url):
    monkeypatch.setenv(pull.URL_VARIABLE, allowed)
    assert pull.source(url, "t") == pull.Source(url.rstrip("/"), "t")


@pytest.mark.parametrize(
    "url",
    [
        "http://elsewhere/weights",
        "https://trainer:80/weights",
        "http://trainer:81/weights",
        "http://trainer:80/other",
        "http://trainer:80@elsewhere/weights",
        "file:///weights",
        "",
    ],
)
def test_any_other_is_refused(monkeypatch, url):
    monkeypatch.setenv(pull.URL_VARIABLE, "http://trainer:80/weights")
    with pytest.raises(WeightFileError, match="NIGHTSHIFT_WEIGHT_URL allows http://trainer:80/weights alone"):
        pull.source(url, "t")


def test_without_a_named_server_nothing_is_fetched(monkeypatch):
    monkeypatch.delenv(pull.URL_VARIABLE, raising=False)
    with pytest.raises(WeightFileError, match="started without NIGHTSHIFT_WEIGHT_URL"):
        pull.source("http://trainer/weights", "t")


@pytest.mark.parametrize(
    "name", ["../1.safetensors", "/1.safetensors", "1", "", None, ".1.safetensors", "a/b.safetensors"]
)
def test_a_name_that_could_lead_elsewhere_is_refused(name):
    with pytest.raises(WeightFileError, match="has a name that none can have"):
        pull.remote_file({"path": name, "bytes": 1, "digest": DIGEST})


@pytest.mark.parametrize(
    "info", [{}, {"bytes": 1}, {"digest": DIGEST}, {"bytes": 1, "digest": "short"}, {"bytes": None, "digest": DIGEST}]
)
def test_a_file_without_its_digest_is_refused(info):
    with pytest.raises(WeightFileError, match=r"1\.safetensors comes by HTTP without its size or its BLAKE3"):
        pull.remote_file({"path": "1.safetensors", **info})


def test_a_file_that_is_there_is_not_fetched_again(tmp_path):
    data = b"weights"
    (tmp_path / "2.safetensors").write_bytes(data)
    file = pull.RemoteFile("2.safetensors", len(data), blake3(data).hexdigest())
    nowhere = pull.Source("http://127.0.0.1:1/weights", "t")
    assert pull.fetch(nowhere, file, tmp_path, deadline_s=0.0) == tmp_path / "2.safetensors"


def test_a_server_that_is_not_there_is_named_and_leaves_no_file(tmp_path):
    (tmp_path / "1.safetensors").write_bytes(b"old")
    file = pull.RemoteFile("2.safetensors", 3, DIGEST)
    with pytest.raises(WeightFileError, match=r"http://127\.0\.0\.1:1/weights/2\.safetensors did not come in time"):
        pull.fetch(pull.Source("http://127.0.0.1:1/weights", "t"), file, tmp_path, deadline_s=0.1)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv(pull.CACHE_VARIABLE, str(folder))
    assert pull.cache_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(WeightFileError, match="belongs to others"):
        pull.cache_folder()


def test_without_a_name_the_folder_is_this_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv(pull.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert pull.cache_folder() == Path(tmp_path) / f"nightshift-weights-{os.getuid()}"
