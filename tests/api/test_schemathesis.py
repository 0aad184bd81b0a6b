"""HTTP responses match the OpenAPI document for generated requests."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencecenter.api.body import parse
from inferencecenter.api.endpoint import Operation
from inferencecenter.api.openapi import document
from inferencecenter.api.operations import OPERATIONS
from inferencecenter.core.errors import InferenceCenterError
from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis import Case

    AnyCase = Case[Any]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WITHOUT_HUB = [row for row in OPERATIONS if row.path != "/api/pull"]
"""Operations that ask no other server."""
WITH_BODIES = [row for row in OPERATIONS if row.body is not None]


@pytest.mark.parametrize("row", WITH_BODIES, ids=lambda row: row.path)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_generated_body_is_accepted_or_refused(row: Operation, data: st.DataObject) -> None:
    """Any value of the declared fields is valid or named in the error."""
    assert row.body is not None
    refused = None
    names = st.sampled_from([*row.body.model_fields, "unknown"])
    body = data.draw(st.dictionaries(names, JSON, max_size=6))
    try:
        parse(row.body, orjson.dumps(body))
    except InferenceCenterError as error:
        refused = error
    assert refused is None or (refused.spec.http_status == 400 and len(refused.message) < 1000)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon without a model, whose limit of failed tokens is high enough for the test."""
    with run_daemon(
        tmp_path_factory.mktemp("echo") / "state",
        None,
        INFERENCECENTER_ENGINE__BACKEND="echo",
        INFERENCECENTER_SERVER__LOGIN_ATTEMPTS_PER_MINUTE="100000",
    ) as daemon:
        yield daemon


@pytest.mark.slow
@pytest.mark.parametrize("row", WITHOUT_HUB, ids=lambda row: f"{row.method} {row.path}")
def test_responses_match_the_document(row: Operation, echo: Daemon) -> None:
    """No response is a 5xx; status, media type, headers and body are as described."""
    import schemathesis  # noqa: PLC0415 - it takes a second to load, which only slow runs have
    from schemathesis import GenerationMode  # noqa: PLC0415 - likewise

    operation = schemathesis.openapi.from_dict(document(OPERATIONS))[row.path][row.method]
    _try(operation.as_strategy(generation_mode=GenerationMode.POSITIVE).map(_answerable), echo)
    if row.body is not None or "{" in row.path:  # an operation without input accepts everything
        _try(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), echo)


def _try(cases: st.SearchStrategy[AnyCase], echo: Daemon) -> None:
    from schemathesis.specs.openapi.checks import (  # noqa: PLC0415 - likewise
        negative_data_rejection,
        positive_data_acceptance,
    )

    @given(case=cases)
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    def ask(case: AnyCase) -> None:
        headers = {"Authorization": f"Bearer {echo.admin_token}"}
        response = case.call(base_url=f"http://127.0.0.1:{echo.port}", headers=headers)
        # Options may contradict each other, which the document does not say in schemas.
        excluded: list[Any] = [positive_data_acceptance]
        if "x-warning" in response.headers:  # a field without effect, which the header names, may have any value
            excluded.append(negative_data_rejection)
        case.validate_response(response, excluded_checks=excluded, headers=headers)
        _end_refusals(echo)

    ask()


def _end_refusals(echo: Daemon) -> None:
    """Send a request that is accepted: refusals in a row are delayed."""
    headers = {"Authorization": f"Bearer {echo.admin_token}"}
    with urlopen(Request(f"http://127.0.0.1:{echo.port}/v1/models", headers=headers)) as answer:
        assert answer.status == HTTPStatus.OK


def _answerable(case: AnyCase) -> AnyCase:
    """Return a case with a valid prompt and model, so that the other fields are reached."""
    if isinstance(case.body, dict):
        questions: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
        case.body |= {name: question for name, question in questions.items() if name in case.body}
        case.body.pop("model", None)
        if "messages" in case.body or "input" in case.body:
            case.body["model"] = "echo"
    return case
