"""Builds what each daemon builds of constants: 0.3 s of CPU time, once in the process of which daemons are forks."""

from __future__ import annotations

from inferencecenter.protocol.base import Event, Request, build_messages
from inferencecenter.protocol.values import Value
from inferencecenter.server.web import read_web_files

for _ in build_messages(Request, Event, Value):
    pass
read_web_files()
