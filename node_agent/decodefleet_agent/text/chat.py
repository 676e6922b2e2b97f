"""The model's chat template: messages to one prompt, in a sandbox, since the template comes with the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decodefleet_agent.text.errors import TextError


class Message(TypedDict):
    role: str
    content: str


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """`source` is Jinja, with the names that Hugging Face's templates use. Raises TextError if it does not parse."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TextError(f"the model's chat template does not parse: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the assistant's next message. Raises TextError with the template's own complaint."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TextError(f"the model's chat template refuses these messages: {error}") from error
