"""The table of scopes: the permissions of an account."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Scope(StrEnum):
    """A permission of an account."""

    USER = "user"
    PRIORITY = "priority"
    OPERATOR = "operator"
    ADMIN = "admin"


SCOPES: Final[Mapping[Scope, str]] = MappingProxyType(
    {
        Scope.USER: "Open sessions, generate, and read the client's own sessions and the metrics.",
        Scope.PRIORITY: "Raise the priority class of the client's own turns above the account's.",
        Scope.OPERATOR: "Read the status and usage of all clients and /metrics, swap, pull and delete models, drain "
        "the daemon.",
        Scope.ADMIN: "List which clients are connected, and close their sockets; manage accounts and tokens; list and "
        "delete sessions of all clients, without reading them; read the log and the audit log; drain machines of "
        "the cluster.",
    }
)


def parse_scopes(names: Iterable[str]) -> frozenset[Scope]:
    """Return the scopes with these names.

    Raises:
        InferenceCenterError: ``invalid_request`` naming the first unknown scope.
    """
    scopes = set()
    for name in names:
        if name not in SCOPES:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"scopes contains {name!r}, which is not a scope",
                field="scopes",
                hint=f"One of: {', '.join(SCOPES)}.",
            )
        scopes.add(Scope(name))
    return frozenset(scopes)
