"""Base classes of all wire messages: validation, ``op``, the echoed ``id``, and the marks of the first protocol (†)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_Base = TypeVar("_Base", bound=BaseModel)

PROTOCOL_VERSION: Final = 1
SUBPROTOCOL: Final = "inferencecenter.v1"
TOKEN_SUBPROTOCOL_PREFIX: Final = "token."  # noqa: S105 - the prefix, not a token


class FirstProtocol:
    """Marks a field of the first protocol (shown as † in the documentation)."""


FIRST_PROTOCOL: Final = FirstProtocol()

RequestId = Annotated[str, StringConstraints(max_length=64)]
SessionId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
TurnId = Annotated[str, StringConstraints(min_length=1, max_length=64)]


# Validators are built on first use, because a client imports all messages and uses few of them; this halves its time to
# start. The daemon builds all of them while its engine loads, see ``build_messages``. For the same reason modules of
# messages have no ``from __future__ import annotations``, with which pydantic would evaluate each annotation from text.


class Request(BaseModel):
    """A frame sent by the client. Unknown fields and wrong types are errors; no value is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    op: str
    id: Annotated[RequestId | None, FIRST_PROTOCOL] = Field(
        default=None, description="Echoed in the direct reply and in every error this frame causes."
    )

    first_protocol: ClassVar[bool] = False
    """Whether the op belongs to the first protocol."""


class Event(BaseModel):
    """A frame sent by the daemon. Fields that are ``None`` are omitted unless ``keeps_null`` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    op: str
    id: Annotated[str | None, FIRST_PROTOCOL] = Field(default=None, description="The `id` of the frame this answers.")

    first_protocol: ClassVar[bool] = False
    """Whether the op is sent to sockets of the first protocol."""
    keeps_null: ClassVar[bool] = False
    """Whether absent values are sent as null; for readings, any of which may be missing."""


class SessionEvent(Event):
    """An event in the numbered history of a session."""

    session_id: Annotated[str, FIRST_PROTOCOL] = Field(description="The session this belongs to.")
    seq: int = Field(ge=1, description="Counter per session, never reused within an epoch.")


class TurnEvent(SessionEvent):
    """A session event that belongs to a turn."""

    turn_id: str = Field(description="The turn this belongs to.")


def messages_in(module: Mapping[str, object], base: type[_Base]) -> tuple[type[_Base], ...]:
    """Return the subclasses of ``base`` that a module defines, in their order; ``module`` is its ``vars()``."""
    kinds = (kind for kind in module.values() if isinstance(kind, type) and issubclass(kind, base))
    return tuple(kind for kind in kinds if kind.__module__ == module["__name__"])


def build_messages(*bases: type[BaseModel]) -> Iterator[None]:
    """Build the validators of all subclasses; each iteration builds one, which takes up to a millisecond."""
    for base in bases:
        for kind in base.__subclasses__():
            kind.model_rebuild()
            yield
            yield from build_messages(kind)
