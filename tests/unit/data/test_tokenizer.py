"""The tokenizer and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nightshift.data import Tokenizer
from nightshift.wire.errors import BadInputError
from tests.fixtures.tokenizer_k import BOS, EOS, EOT, MAX_POSITIONS, TEMPLATE, VOCAB_SIZE, write_folder

_MESSAGES = [{"role": "user", "content": "1+1"}]


def test_what_the_folder_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.max_positions == MAX_POSITIONS
    assert tokenizer.bos_id == BOS
    assert tokenizer.eos_ids == (EOS,)
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(EOS, None, (2,)), ([2, 3], None, (2, 3)), (EOT, [0, 3], (0, 2, 3)), (EOS, EOT, (2, 3)), (True, None, (2,))],
)
def test_eos_ids_are_the_union_of_all_files(
    tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path / "k", eos_token_id=config, generation_eos=generation)
    assert Tokenizer.load(folder).eos_ids == expected


def test_text_goes_to_ids_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("cab", add_special_tokens=False)
    assert tokenizer.decode(ids) == "cab"
    assert len(ids) == 2  # c and ab
    assert tokenizer.decode([*ids, EOS]) == "cab"
    assert tokenizer.decode([*ids, EOS], skip_special_tokens=False) == "cab<eos>"
    assert tokenizer.encode("a").tolist() == [BOS, tokenizer.encode("a", add_special_tokens=False)[0]]


def test_the_chat_template_is_rendered(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template(_MESSAGES) == "<bos>user:1+1<eot>assistant:"
    assert tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=False) == "<bos>user:1+1<eot>"


def test_o30_one_bos_whether_the_template_or_the_tokenizer_writes_it(tmp_path: Path) -> None:
    for adds_bos in (True, False):
        tokenizer = Tokenizer.load(write_folder(tmp_path / str(adds_bos), adds_bos=adds_bos))
        ids = tokenizer.encode_prompt(_MESSAGES)
        assert ids.tolist().count(BOS) == 1
        assert ids[0] == BOS
        assert ids.tolist() == tokenizer.encode_prompt("1+1").tolist()
    raw = Tokenizer.load(tmp_path / "True")
    assert raw.encode_prompt("1+1", apply_chat_template=False).tolist().count(BOS) == 1
    assert raw.encode_prompt("<bos>1+1", apply_chat_template=False).tolist().count(BOS) == 1


def test_o30_a_template_without_bos_gets_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template="{{ messages[0].content }}"))
    assert BOS in tokenizer.encode("1+1")
    assert BOS not in tokenizer.encode_prompt(_MESSAGES)


def test_o30_a_tokenizer_that_closes_texts_does_not_close_a_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", adds_eos=True))
    assert EOS in tokenizer.encode("a")
    assert EOS not in tokenizer.encode_prompt("a", apply_chat_template=False)
    assert tokenizer.encode_prompt("a<eos>", apply_chat_template=False)[-1] == EOS  # the user's own stays


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "k", template="{{ raise_exception('no') }}", template_file="file:{{ eos_token }}")
    assert Tokenizer.load(folder).apply_chat_template(_MESSAGES) == "file:<eos>"


def test_named_templates(tmp_path: Path) -> None:
    two = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "plain"}]
    assert Tokenizer.load(write_folder(tmp_path / "a", template=two)).apply_chat_template(_MESSAGES) == "plain"
    one = [{"name": "chat", "template": "only"}]
    assert Tokenizer.load(write_folder(tmp_path / "b", template=one)).apply_chat_template(_MESSAGES) == "only"
    with pytest.raises(BadInputError, match="chat, tool_use"):
        Tokenizer.load(write_folder(tmp_path / "c", template=[*one, two[0]]))


def test_a_template_of_the_job_comes_first(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("mine {{ messages[0].content }}", encoding="utf-8")
    assert Tokenizer.load(tokenizer_folder, str(path)).apply_chat_template(_MESSAGES) == "mine 1+1"
    with pytest.raises(BadInputError, match="chatml, qwen, llama3, phi3"):
        Tokenizer.load(tokenizer_folder, str(tmp_path / "absent.jinja"))


_THREE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Yes"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
            "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
            "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "phi3",
            "<|system|>\nBe brief.<|end|>\n<|user|>\n Hi <|end|>\n<|assistant|>\nYes<|end|>\n<|assistant|>\n",
        ),
    ],
)
def test_built_in_templates(tokenizer_folder: Path, name: str, text: str) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder, name)
    assert tokenizer.apply_chat_template(_THREE) == text
    assert tokenizer.unknown_markers  # K has none of these tokens


def test_qwen_gives_a_conversation_without_system_turn_its_own(tokenizer_folder: Path) -> None:
    text = Tokenizer.load(tokenizer_folder, "qwen").apply_chat_template(_MESSAGES)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n1+1")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n    {{ m.role }}\n{% endfor %}\n", "    user\n"),  # trim_blocks, lstrip_blocks
        ("{% for m in messages %}\n  {% if m.role %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "1+1"}]'),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% if tools is none and not documents %}none{% endif %}", "none"),
        ("{{ bos_token }}{{ pad_token }}{{ unk_token }}", "<bos><pad>"),
    ],
)
def test_templates_find_what_they_expect(tmp_path: Path, source: str, text: str) -> None:
    assert Tokenizer.load(write_folder(tmp_path / "k", template=source)).apply_chat_template(_MESSAGES) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('refused') }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.like.it }}",
    ],
)
def test_a_template_that_raises_or_reaches_out_is_refused(tmp_path: Path, source: str) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template=source))
    with pytest.raises(BadInputError, match="chat_template"):
        tokenizer.apply_chat_template(_MESSAGES)


def test_a_template_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="not valid Jinja"):
        Tokenizer.load(write_folder(tmp_path / "k", template="{% for %}"))


def test_o27_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template=None))
    with pytest.raises(BadInputError, match="chat_template"):
        tokenizer.encode_prompt(_MESSAGES)
    assert len(tokenizer.encode_prompt("1+1", apply_chat_template=False)) == 4


def test_missing_and_malformed_files_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(BadInputError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")
    (tokenizer_folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"config\.json"):
        Tokenizer.load(tokenizer_folder)
    (tokenizer_folder / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(BadInputError, match="list"):
        Tokenizer.load(tokenizer_folder)
    (tokenizer_folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"tokenizer\.json"):
        Tokenizer.load(tokenizer_folder)


def test_other_places_of_the_sizes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "k", template=TEMPLATE)
    (folder / "config.json").unlink()
    bare = Tokenizer.load(folder)
    assert bare.max_positions is None
    assert bare.vocab_size == 48
    assert bare.eos_ids == (EOS,)
    nested = {"text_config": {"vocab_size": 70, "max_position_embeddings": 99, "eos_token_id": [3]}}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(nested), encoding="utf-8")
    both = Tokenizer.load(folder, model=model)
    assert (both.vocab_size, both.max_positions, both.eos_ids) == (70, 99, (2, 3))


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "k")
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("cdefgh", add_special_tokens=False)) == 6
