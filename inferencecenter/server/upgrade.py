"""What an upgrade request brings along: a credential, a dialect, and reasons to refuse it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, QueryParams

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL, TOKEN_SUBPROTOCOL_PREFIX
from inferencecenter.server.authentication import Credential, KeyCredential, TokenCredential

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_QUERY_BYTES: Final = 4096
_SECRET_PARAMETERS: Final = ("token", "access_token", "api_key")


def chooses_v1(subprotocols: Sequence[str]) -> bool:
    """Tell whether the client offers the daemon's own subprotocol."""
    return SUBPROTOCOL in subprotocols


def check_query(query: bytes) -> None:
    """Refuse an address that holds a secret, or far more than any here takes.

    Raises:
        InferenceCenterError: ``invalid_request`` naming the parameter, but not its value.
    """
    check_query_length(query)
    parameters = QueryParams(query)
    for name in _SECRET_PARAMETERS:
        if name in parameters:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{name} stands in the address, where logs and histories keep it",
                field=name,
                hint=f"Send Authorization: Bearer, or the subprotocols {SUBPROTOCOL} and"
                f" {TOKEN_SUBPROTOCOL_PREFIX}<token>, or an auth frame; and replace this token.",
            )


def check_query_length(query: bytes) -> None:
    """Refuse a query that takes milliseconds to read, as it is read before there is a token.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if len(query) > MAX_QUERY_BYTES:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"the address has {len(query)} bytes of parameters; {MAX_QUERY_BYTES} are allowed",
        )


def read_credential(headers: Headers, subprotocols: Sequence[str] = ()) -> Credential | None:
    """Return the credential of a request, ``None`` when it has none.

    Raises:
        InferenceCenterError: ``not_authenticated`` when half of one is there.
    """
    if (authorization := headers.get("authorization")) is not None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED, "Authorization is not a bearer token", hint="Authorization: Bearer <token>"
            )
        return TokenCredential(token.strip())
    client_id, api_key = headers.get("x-client-id"), headers.get("x-api-key")
    if client_id is not None and api_key is not None:
        return KeyCredential(client_id, api_key)
    if client_id is not None or api_key is not None:
        missing = "X-API-Key" if api_key is None else "X-Client-ID"
        raise InferenceCenterError(
            ErrorCode.NOT_AUTHENTICATED, f"{missing} is missing", hint="X-Client-ID and X-API-Key go together."
        )
    for subprotocol in subprotocols:
        if subprotocol.startswith(TOKEN_SUBPROTOCOL_PREFIX):
            return TokenCredential(subprotocol.removeprefix(TOKEN_SUBPROTOCOL_PREFIX))
    return None
