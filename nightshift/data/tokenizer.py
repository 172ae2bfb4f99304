"""A model's tokenizer and chat template, read from its folder without torch or transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from nightshift.data.decoding import TokenTable
from nightshift.data.messages import Message
from nightshift.data.templates import MARKERS, ChatTemplate, template_source
from nightshift.wire.errors import BadInputError

Ids = NDArray[np.int32]

_ROLE = "job"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back, as the model's own tokenizer has it.

    Attributes:
        folder: the model's folder.
        special_tokens: ``bos_token``, ``eos_token`` and the like, as templates see them.
        bos_id: id of the beginning-of-sequence token, None without one.
        eos_ids: ids that end a response, sorted: those of generation_config.json, config.json and the tokenizer.
        vocab_size: rows of the model's embedding (config.json), or the tokenizer's own size without that file.
        max_positions: longest sequence of the model; None where config.json does not say.
        chat_template: the template in use; None without one.
        unknown_markers: pieces of a built-in template that this tokenizer does not know as one token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        folder: Path,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        vocab_size: int,
        max_positions: int | None,
        chat_template: ChatTemplate | None,
    ) -> None:
        # Files may ask for truncation or padding, which belong to the caller here.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.folder = folder
        self.special_tokens = dict(special_tokens)
        bos = self.special_tokens.get("bos_token")
        self.bos_id: int | None = backend.token_to_id(bos) if bos else None
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.chat_template = chat_template
        markers = MARKERS.get(chat_template.origin, ()) if chat_template else ()
        self.unknown_markers = tuple(marker for marker in markers if backend.token_to_id(marker) is None)

    @classmethod
    def load(
        cls, folder: str | Path, chat_template: str | None = None, *, model: str | Path | None = None
    ) -> Tokenizer:
        """Reads tokenizer.json and what stands beside it.

        Args:
            folder: local folder with tokenizer.json.
            chat_template: built-in name or path of a Jinja file; None: the tokenizer's own (chat_template.jinja, or
                ``chat_template`` in tokenizer_config.json, the one named "default" where there are several).
            model: folder of config.json and generation_config.json, where it is another one.

        Raises:
            BadInputError: a file is missing or malformed; the message names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadInputError(
                f"no tokenizer.json in {str(folder)!r}",
                role=_ROLE,
                fix="Give a folder saved with a fast tokenizer, in model.path or model.tokenizer",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise BadInputError(f"{str(path)!r} cannot be read: {error}", role=_ROLE) from error
        settings = _read_json(folder / "tokenizer_config.json")
        special = {**_special(_read_json(folder / "special_tokens_map.json")), **_special(settings)}
        model_folder = folder if model is None else Path(model)
        config = _read_json(model_folder / "config.json")
        generation = _read_json(model_folder / "generation_config.json")
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
        eos = [
            *_ids(config.get("eos_token_id")),
            *_ids(text.get("eos_token_id")),
            *_ids(generation.get("eos_token_id")),
        ]
        if "eos_token" in special and (own := backend.token_to_id(special["eos_token"])) is not None:
            eos.append(own)
        found = template_source(chat_template) if chat_template is not None else _own_template(folder, settings)
        return cls(
            backend,
            folder=folder,
            special_tokens=special,
            eos_ids=eos,
            vocab_size=_size(config, text, "vocab_size") or backend.get_vocab_size(with_added_tokens=True),
            max_positions=_size(config, text, "max_position_embeddings", "n_positions", "max_seq_len"),
            chat_template=None if found is None else ChatTemplate(found[0], found[1], special),
        )

    @functools.cached_property
    def _table(self) -> TokenTable | None:
        return TokenTable.of(self._backend, self.vocab_size)

    @property
    def end_id(self) -> int | None:
        """The id that ends an answer in training data: the tokenizer's own, else the smallest that ends a response."""
        own = self.special_tokens.get("eos_token")
        found = self._backend.token_to_id(own) if own else None
        return found if found is not None else next(iter(self.eos_ids), None)

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        """Ids of a text. Special tokens that stand in the text as such are recognised in either case."""
        return np.array(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Raises:
            BadInputError: there is no chat template, or it raised.
        """
        if self.chat_template is None:
            raise BadInputError(
                f"the tokenizer in {str(self.folder)!r} has no chat_template, and the prompt is a list of messages",
                role=_ROLE,
                fix="Name one in data.chat_template: chatml, qwen, llama3, phi3, or the path of a Jinja file",
            )
        return self.chat_template.render(messages, add_generation_prompt)

    def encode_prompt(self, prompt: str | Sequence[Message], apply_chat_template: bool = True) -> Ids:
        """Ids of a prompt, ready for a response to follow.

        A list of messages, and with ``apply_chat_template`` a text as one user turn, goes through the chat template,
        whose output is encoded as it is: it is the template that writes the beginning of the sequence. Other text gets
        the tokenizer's own beginning, once, and no end.

        Raises:
            BadInputError: no chat template, or it raised.
        """
        if isinstance(prompt, str) and not apply_chat_template:
            return self._encode_texts([prompt], add_special_tokens=True)[0]
        return self._encode_texts([self.prompt_text(prompt)], add_special_tokens=False)[0]

    def prompt_text(self, prompt: str | Sequence[Message]) -> str:
        """A prompt through the chat template, with the opening of the answer."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.apply_chat_template(messages, add_generation_prompt=True)

    def encode_prompts(self, texts: Sequence[str], *, templated: bool) -> list[Ids]:
        """Ids of many prompt texts at once: output of :meth:`prompt_text`, or text that gets no template."""
        return self._encode_texts(texts, add_special_tokens=not templated)

    def check_ids(self, ids: Ids, where: str) -> None:
        """Checks that the model has a row for each of the ids, of which there is at least one.

        Raises:
            BadInputError: it has not; ``where`` begins the message.
        """
        if ids.max() >= self.vocab_size:
            raise BadInputError(
                f"{where}: the tokenizer gives id {ids.max()}, and the model's vocab_size is {self.vocab_size}",
                role=_ROLE,
                fix="Give model.tokenizer the tokenizer that belongs to the model",
            )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        if isinstance(ids, np.ndarray) and self._table is not None:
            text = self._table.decode(ids, skip_special_tokens)
            if text is not None:
                return text
        plain = ids.tolist() if isinstance(ids, np.ndarray) else [int(item) for item in ids]
        return self._backend.decode(plain, skip_special_tokens=skip_special_tokens)

    def _encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
        result = []
        for encoding in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens):
            ids = encoding.ids
            # Some tokenizers close every text; a prompt that ends like that has nothing left to answer.
            added = encoding.special_tokens_mask if add_special_tokens else []
            while ids and added and added[-1] and ids[-1] in self.eos_ids:
                ids, added = ids[:-1], added[:-1]
            if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
                ids = ids[1:]
            result.append(np.array(ids, np.int32))
        return result


def template_warnings(tokenizer: Tokenizer) -> tuple[str, ...]:
    """A sentence on pieces of a built-in template that the tokenizer does not know as one token, if there are any."""
    if not tokenizer.unknown_markers or tokenizer.chat_template is None:
        return ()
    return (
        f"the chat template {tokenizer.chat_template.origin!r} writes {', '.join(tokenizer.unknown_markers)}, which "
        f"the tokenizer in {str(tokenizer.folder)!r} does not know as one token",
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON map; empty where the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{str(path)!r} cannot be read: {error}", role=_ROLE) from error
    if not isinstance(value, dict):
        raise BadInputError(f"{str(path)!r} holds {type(value).__name__}, expected a map", role=_ROLE)
    return value


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is text, or a map with its text as ``content``."""
    result = {}
    for name in _SPECIAL:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            result[name] = value
    return result


def _ids(value: Any) -> list[int]:
    """An id or a list of ids; bool is an int in Python, and no id."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _size(config: Mapping[str, Any], text_config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        for place in (config, text_config):
            value = place.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _own_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    value, origin = settings.get("chat_template"), str(folder / "tokenizer_config.json")
    if isinstance(value, str):
        return value, origin
    if isinstance(value, list):
        named = {
            item["name"]: item["template"]
            for item in value
            if isinstance(item, Mapping) and isinstance(item.get("template"), str) and "name" in item
        }
        if "default" in named:
            return named["default"], f"{origin} (default)"
        if len(named) == 1:
            name, source = next(iter(named.items()))
            return source, f"{origin} ({name})"
        if named:
            raise BadInputError(
                f"{origin!r} has the chat_templates {', '.join(map(str, named))} and none named default",
                role=_ROLE,
                fix="Name one in data.chat_template, as the path of a Jinja file",
            )
    return None
