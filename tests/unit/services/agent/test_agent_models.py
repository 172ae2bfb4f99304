"""From a model path to a local folder."""

import threading
import time

import pytest

from nightshift.wire.errors import BadInputError
from services.agent import models

BUILTIN = "builtin:smollm2-135m-instruct"


def make_model(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_local_folder_is_itself(tmp_path, capsys):
    folder = make_model(tmp_path / "m")
    assert models.resolve(str(folder)) == folder
    assert models.main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(tmp_path, missing):
    folder = make_model(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(BadInputError, match=missing.replace("model", r"\*")):
        models.resolve(str(folder))


def test_an_adapter_is_not_the_model(tmp_path):
    folder = make_model(tmp_path / "m")
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(BadInputError, match="holds an adapter"):
        models.resolve(str(folder))


@pytest.mark.parametrize("path", ["/no/such/folder", "./m", "a/b/c", "../x", "", "a b", "~/nothing-here"])
def test_a_path_that_is_neither_folder_nor_id_is_refused_without_asking_the_hub(path):
    with pytest.raises(BadInputError, match="does not exist"):
        models.resolve(path)


def test_an_unknown_builtin_name_is_refused_with_the_known_one():
    with pytest.raises(BadInputError, match=f"'gpt'.*{BUILTIN}"):
        models.resolve("builtin:gpt")


def test_a_model_that_the_hub_does_not_give_is_one_sentence_and_exit_code_2(monkeypatch, capsys):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no route\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert models.main(["some/model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("[model] model 'some/model'")
    assert "ConnectionError: no route" in last
    assert "Check the name and the network" in last


def test_a_builtin_model_is_made_once_even_by_two_at_a_time(monkeypatch, tmp_path):
    made = []

    def convert(source, folder):
        made.append(folder)
        time.sleep(0.2)
        make_model(folder)

    monkeypatch.setenv("NIGHTSHIFT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_convert_smollm2", convert)
    found = []
    threads = [threading.Thread(target=lambda: found.append(models.resolve(BUILTIN))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [tmp_path / "models" / "smollm2-135m-instruct-bf16"] * 3
    assert sorted(path.suffix for path in (tmp_path / "models").iterdir()) == ["", ".lock"]


def test_a_conversion_that_breaks_off_leaves_nothing_that_looks_like_a_model(monkeypatch, tmp_path):
    def convert(source, folder):
        (folder / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setenv("NIGHTSHIFT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_convert_smollm2", convert)
    with pytest.raises(OSError, match="disk full"):
        models.resolve(BUILTIN)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]
