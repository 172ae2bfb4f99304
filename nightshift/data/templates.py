"""Chat templates: the built-in ones, and the Jinja environment in which any template is rendered."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nightshift.wire.errors import BadInputError

_ROLE = "job"

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: ChatML as the Qwen2 instruct models were trained on it: a conversation without a system turn gets the usual one.
_QWEN = (
    "{% if messages and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}"
) + _CHATML
_LLAMA3 = (
    "{{ '<|begin_of_text|>' }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

#: Built-in templates by the name that ``data.chat_template`` takes.
BUILTIN: Mapping[str, str] = {"chatml": _CHATML, "qwen": _QWEN, "llama3": _LLAMA3, "phi3": _PHI3}

#: Pieces of text that a built-in template relies on being one token each.
MARKERS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``, by which some templates mark assistant text: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    Templates come with models, so they are rendered in a sandbox without access to Python's internals. They find what
    the templates of Hugging Face models expect: the special tokens by name, ``messages``, ``add_generation_prompt``,
    ``raise_exception``, ``strftime_now``, the filter ``tojson``, and blocks that swallow the newline after them.

    Args:
        source: Jinja source.
        origin: where it came from, for messages.
        special_tokens: ``bos_token``, ``eos_token`` and the like.

    Raises:
        BadInputError: the source is not a Jinja template.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.origin = origin
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise BadInputError(f"chat_template of {origin} is not valid Jinja: {error}", role=_ROLE) from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a conversation.

        Raises:
            BadInputError: the template raised, by itself (a role it refuses) or by mistake.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # templates compute with whatever the messages hold
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise BadInputError(f"chat_template of {self.origin} raised {kind}{error}", role=_ROLE) from error


def template_source(name: str) -> tuple[str, str]:
    """Source and origin of a built-in template or a Jinja file.

    Raises:
        BadInputError: neither a built-in name nor a readable file.
    """
    if name in BUILTIN:
        return BUILTIN[name], name
    try:
        return Path(name).read_text(encoding="utf-8"), name
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadInputError(
            f"data.chat_template {name!r} is neither a built-in template nor a readable file",
            role=_ROLE,
            fix=f"Built-in templates are {', '.join(BUILTIN)}",
        ) from error


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the models saw it: without jinja's escapes for HTML."""
    pair = None if separators is None else tuple(separators)
    if pair is not None and len(pair) != 2:
        raise TemplateError("tojson: separators must be two strings")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
