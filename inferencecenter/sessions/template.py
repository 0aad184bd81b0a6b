"""From messages to the text a model was trained on: the model's own chat template, or plain concatenation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import structlog
from jinja2 import TemplateError

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.quoting import Rendering, SpecialTexts
from inferencecenter.sessions.sandbox import TemplateRefusalError, TemplateSandbox

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.values import ChatMessage

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What is used for a model that has no template of its own."""

_log = structlog.get_logger(__name__)


class Renderer(Protocol):
    """Turns a conversation into text that asks for the next answer."""

    implied_bos: str
    """Text of the token that the engine puts first by itself, empty when it does not."""
    keeps_end: bool
    """Whether the token that ended an answer is part of the rendered history."""

    def render(self, messages: Sequence[ChatMessage], *, now: datetime, asks: bool = True) -> Rendering:
        """Return the whole conversation as text, which ``asks`` for an answer or just ends.

        Raises:
            InferenceCenterError: ``invalid_request`` when the conversation does not suit the template, ``internal``
                when the template is in error.
        """


class RawText:
    """Conversations in raw mode: one text that grows, in which nothing is special."""

    implied_bos = ""
    keeps_end = False

    def render(self, messages: Sequence[ChatMessage], *, now: datetime, asks: bool = True) -> Rendering:
        """Return all contents one after the other."""
        return Rendering("".join(message.content for message in messages), special=False)


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises:
        InferenceCenterError: ``internal`` when the template does not compile.
    """

    keeps_end = True

    def __init__(self, model: ModelInfo) -> None:
        if not model.chat_template:
            _log.warning("chat_template_missing", model=model.name, used="chatml")
        self._special = SpecialTexts(model.special_tokens)
        self._sandbox = TemplateSandbox()
        self._constants = {"bos_token": model.bos_token, "eos_token": model.eos_token, "tools": None, "documents": None}
        self.implied_bos = model.bos_token if model.add_bos else ""
        try:
            self._template = self._sandbox.from_string(model.chat_template or CHATML)
        except (TemplateError, RecursionError) as error:
            raise _broken(error) from error

    def render(self, messages: Sequence[ChatMessage], *, now: datetime, asks: bool = True) -> Rendering:
        """Return the conversation as the template writes it, up to where the model answers if it ``asks``.

        Raises:
            InferenceCenterError: See ``Renderer``.
        """
        values = {
            **self._constants,
            "messages": [
                {"role": message.role, "content": self._special.mark(message.content)} for message in messages
            ],
            "add_generation_prompt": asks,
        }
        try:
            return Rendering.of_marked(self._sandbox.run(self._template, values, now=now), tokens=self._special.texts)
        except TemplateRefusalError as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"the model's chat template refuses the conversation: {error.message}",
                field="messages",
                hint="The order of roles must suit the model; some know no system prompt.",
            ) from error
        # The border to a program from a model file, which can fail in any way a program can.
        except Exception as error:
            raise _broken(error) from error


def _broken(error: Exception) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INTERNAL,
        f"the model's chat template is in error: {type(error).__name__}: {str(error)[:200]}",
        hint='Sessions with mode "raw" use no template.',
    )
