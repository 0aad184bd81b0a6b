"""Fields of foreign dialects: obeyed, accepted without effect, or refused.

The models of a dialect's requests declare the fields that are obeyed, and refuse values that they cannot obey. Its
``FieldTable`` adds the rest: rules for values that are accepted without effect, because the answer is useful without
them, and for fields that are refused, because the caller relies on what they ask for. A field of neither is unknown and
has no effect. A ``FieldReport`` is the validation context of one request: the models hand it each JSON object, and it
drops what has no effect and records a warning. Without a report the same models refuse unknown fields, as the daemon's
own protocol does. ``docs/fields.md`` is generated from the tables.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, ValidationInfo, model_validator

from inferencecenter.api.body import RequestModel, invalid_field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

UNKNOWN: Final = "unknown"
"""Label of fields that no table has."""

_MAX_WARNINGS: Final = 16
_MAX_NAME_CHARS: Final = 64
_EMPTY_NAME: Final = '""'
_SUGGESTIONS: Final = 4
"""Unknown fields per request for which a similar name is looked for."""


def _always(_value: Any, _siblings: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """Treatment of values of a field that are not obeyed.

    Attributes:
        field: Path of the field, such as ``messages[].name``; ``tools[]`` is each item of a list.
        why: The reason, which completes "… has no effect: ".
        values: The values in words, for the documentation; empty for all.
        applies: Whether the rule applies to a value, given the object that contains it; other values of a field that
            no model declares are satisfied as they are.
        refused: Whether the values are refused.
        kept: Whether the value is validated and echoed in the response all the same.
    """

    field: str
    why: str
    values: str = ""
    applies: Callable[[Any, Mapping[str, Any]], bool] = _always
    refused: bool = False
    kept: bool = False


class DialectModel(RequestModel):
    """Part of a request of a foreign dialect; its validation context is the ``FieldReport`` of the request."""

    @model_validator(mode="before")
    @classmethod
    def _select(cls, data: object, info: ValidationInfo) -> object:
        if isinstance(data, dict) and isinstance(info.context, FieldReport):
            return info.context.select(cls, data)
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema, which allows unknown fields."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        handler.resolve_ref_schema(reference).pop("additionalProperties", None)
        return reference


class FieldTable:
    """The fields of one dialect.

    Args:
        dialect: Its name, a label of metrics.
        models: Models of its bodies and queries; the models in their fields belong to it too.
        rules: Rules for values that are not obeyed.
    """

    def __init__(self, dialect: str, *models: type[BaseModel], rules: Iterable[FieldRule] = ()) -> None:
        self.dialect = dialect
        self.models = models
        self.rules = tuple(rules)
        self._prefixes: dict[type[BaseModel], str] = {}
        for model in models:
            self._add(model, "")
        self._names = {model: frozenset(_names(model)) for model in self._prefixes}
        by_field: defaultdict[str, list[FieldRule]] = defaultdict(list)
        for rule in self.rules:
            by_field[rule.field].append(rule)
        self._rules = {field: tuple(found) for field, found in by_field.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dialect})"

    def prefix(self, model: type[BaseModel]) -> str:
        """Return the path of the objects that a model describes, such as ``messages[].``."""
        return self._prefixes.get(model, "")

    def names(self, model: type[BaseModel]) -> frozenset[str]:
        """Return the names of the fields that a model declares."""
        return self._names.get(model) or frozenset(_names(model))

    def rule(self, field: str, value: Any, siblings: Mapping[str, Any]) -> FieldRule | None:
        """Return the rule that applies to a value, if there is one."""
        return next((rule for rule in self._rules.get(field, ()) if rule.applies(value, siblings)), None)

    def has_rules(self, field: str) -> bool:
        """Return whether any value of a field has a rule."""
        return field in self._rules

    def obeyed(self) -> Iterator[tuple[str, str]]:
        """Yield the path and the description of each field that is obeyed."""
        shown: set[str] = set()
        for model, prefix in self._prefixes.items():
            for name, field in model.model_fields.items():
                path = prefix + (field.alias or name)
                if path not in shown:
                    shown.add(path)
                    yield path, field.description or ""

    def _add(self, model: type[BaseModel], prefix: str) -> None:
        if model in self._prefixes:
            return
        self._prefixes[model] = prefix
        for name, field in model.model_fields.items():
            for inner, is_item in _models_in(field.annotation, is_item=False):
                self._add(inner, f"{prefix}{field.alias or name}{'[]' if is_item else ''}.")


class FieldReport:
    """The fields of one request that have no effect.

    Args:
        table: The table of its dialect.
        strict: Whether such fields are refused.

    Attributes:
        warnings: One sentence for each field.
        labels: The fields as labels of a metric: those of the table, and ``unknown``.
    """

    def __init__(self, table: FieldTable, *, strict: bool) -> None:
        self.table = table
        self.strict = strict
        self.warnings: list[str] = []
        self.labels: set[str] = set()
        self._seen: set[str] = set()
        self._n_suggested = 0

    def add(self, field: str, warning: str) -> None:
        """Record a warning about a field of the table, once.

        Raises:
            InferenceCenterError: ``invalid_request`` in strict mode.
        """
        if self.strict:
            raise invalid_field(field, warning)
        self.labels.add(field)
        self._warn(warning)

    def select(self, model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a JSON object that have an effect.

        Raises:
            InferenceCenterError: ``invalid_request`` for a field that the table refuses, or, in strict mode, for one
                without effect.
        """
        table, prefix = self.table, self.table.prefix(model)
        names = table.names(model)
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if value is None:
                continue
            field = prefix + name
            rule = table.rule(field, value, data)
            if rule is not None:
                self._apply(rule)
            if name in names and (rule is None or rule.kept):
                kept[name] = self._items(field, value) if isinstance(value, list) else value
            elif rule is None and not table.has_rules(field):
                if self.strict:
                    kept[name] = value  # the model refuses it
                else:
                    self._unknown(field, names, prefix)
        return kept

    def _items(self, field: str, items: list[Any]) -> list[Any]:
        """Return the items of a list that have an effect."""
        each = f"{field}[]"
        if not self.table.has_rules(each):
            return items
        kept = []
        for index, item in enumerate(items):
            rule = self.table.rule(each, item, {})
            if rule is None:
                kept.append(item)
            else:
                self._apply(rule, shown=f"{field}.{index}{_kind(item)}")
        return kept

    def _apply(self, rule: FieldRule, *, shown: str = "") -> None:
        shown = shown or rule.field
        if rule.refused:
            raise invalid_field(rule.field, f"{shown} is not supported: {rule.why}")
        self.add(rule.field, f"{shown} has no effect: {rule.why}")

    def _unknown(self, field: str, names: frozenset[str], prefix: str) -> None:
        self.labels.add(UNKNOWN)
        field = field[:_MAX_NAME_CHARS]
        if field in self._seen or len(self._seen) > _MAX_WARNINGS:
            return
        self._seen.add(field)
        similar: list[str] = []
        if self._n_suggested < _SUGGESTIONS:
            self._n_suggested += 1
            similar = get_close_matches(field.removeprefix(prefix), names, n=1)
        hint = f", did you mean {similar[0]}?" if similar else ""
        self._warn(f"{field or _EMPTY_NAME} has no effect: the field is unknown{hint}")

    def _warn(self, warning: str) -> None:
        if warning in self.warnings or len(self.warnings) > _MAX_WARNINGS:
            return
        if len(self.warnings) == _MAX_WARNINGS:
            warning = "Further fields have no effect"
        self.warnings.append(warning)


def _kind(item: Any) -> str:
    """Return the text that represents a list's item in a warning: its type, or the text itself."""
    kind = item.get("type") if isinstance(item, dict) else item
    return f" ({kind[:_MAX_NAME_CHARS]})" if isinstance(kind, str) else ""


def _names(model: type[BaseModel]) -> Iterator[str]:
    return (field.alias or name for name, field in model.model_fields.items())


def _models_in(annotation: Any, *, is_item: bool) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the models in an annotation, each with whether it describes the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_item
    for inner in get_args(annotation):
        yield from _models_in(inner, is_item=is_item or getattr(annotation, "__origin__", None) in (list, tuple))
