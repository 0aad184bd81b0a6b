"""Conversations beyond the limit of a client, on a real daemon with a store: archived, found, loaded and watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.client import Client
from tests.e2e.harness import command_line, connect_client, run_daemon

if TYPE_CHECKING:
    from pathlib import Path

MOST = 2
N_SESSIONS = 4


@pytest.mark.slow
async def test_sessions_beyond_the_limit_are_archived_found_and_loaded(tmp_path: Path, demo_model_path: Path) -> None:
    """Each keeps its text, over the socket, the Python client and a restart; a watching socket is told of another."""
    settings = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "0"}
    state_dir = tmp_path / "state"
    with run_daemon(state_dir, demo_model_path, **settings) as daemon:
        command_line(daemon, "client", "limits", "admin", f"max_sessions={MOST}")
        async with connect_client(daemon) as client, connect_client(daemon) as other:
            names = []
            for n in range(N_SESSIONS):
                names.append(await client.create(metadata={"title": f"Chat {n}"}))
                await client.turn(names[-1], f"Question {n} about otters")
            page = await client.ask(op="list_sessions", order="recent")
            assert [each["session_id"] for each in page["sessions"]] == names[::-1]
            assert [each["session_id"] for each in page["sessions"] if each.get("archived")] == names[-1 - MOST :: -1]
            found = await client.ask(op="search_sessions", query='"question 0" otter')
            assert [each["session"]["session_id"] for each in found["results"]] == names[:1]
            assert found["results"][0]["hits"][0]["snippet"] == "Question 0 about otters"
            resumed = await other.ask(op="resume_session", session_id=names[0])
            assert resumed["transcript"][0]["content"] == "Question 0 about otters"
            detached = await client.until(lambda message: message["op"] == "session_detached")
            assert detached["session_id"] == names[0]
            await other.turn(names[0], "And the rest?")
    with run_daemon(state_dir, demo_model_path, **settings) as daemon:
        async with Client(daemon.url, token=daemon.admin_token) as sdk:
            assert [each.session_id for each in await sdk.sessions()] == names
            assert (await sdk.sessions(order="recent"))[0].session_id == names[0]
            usage = await sdk.session_usage()
            assert usage is not None
            assert usage.live + usage.archived == N_SESSIONS
            matching = await sdk.search_sessions("rest")
            assert [each.session.session_id for each in matching.results] == [names[0]]
            assert len((await sdk.search_sessions("otters", limit=3)).results) == 3
