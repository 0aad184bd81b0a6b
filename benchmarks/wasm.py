"""Measures what a WebAssembly guest adds to a turn and to a streamed token: `python -m benchmarks.wasm --url URL`.

A guest and a program on the Python client do the same: turns of one token, then turns that stream many. Both run in
this process with one connection, in alternation; the difference is the cost of the guest. The CPU time is that of the
process, all threads together.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer
from wasmtime import wat2wasm

from benchmarks.stats import paired_difference
from inferencecenter.client import Client
from inferencecenter.wasm.guest_loop import GuestLoop
from inferencecenter.wasm.host import GuestLog
from inferencecenter.wasm.run import GuestOptions, GuestRun

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT: Final = "Tell me a story."

_GUEST: Final = r"""(module
  (import "wasi_ephemeral_nn" "load_by_name_with_config" (func $load (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "init_execution_context" (func $open (param i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "finalize_execution_context" (func $close (param i32) (result i32)))
  (import "wasi_ephemeral_nn" "set_input" (func $set_input (param i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "compute" (func $compute (param i32) (result i32)))
  (import "wasi_ephemeral_nn" "get_output" (func $get_output (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "compute_single" (func $compute_single (param i32) (result i32)))
  (import "wasi_ephemeral_nn" "get_output_single" (func $get_output_single (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 2)
  (data (i32.const 16) "\00\00\00\00" "\00\00\00\00" "\02\00\00\00" "\00\01\00\00" "{n_prompt:08x}")
  (data (i32.const 64) "default")
  (data (i32.const 256) "{prompt}")
  (data (i32.const 1024) "{config}")
  (func $check (param i32) (if (local.get 0) (then unreachable)))
  (func (export "_start") (local $turn i32) (local $errno i32)
    (call $check (call $load (i32.const 64) (i32.const 7) (i32.const 1024) (i32.const {n_config}) (i32.const 0)))
    (loop $next
      (call $check (call $open (i32.load (i32.const 0)) (i32.const 4)))
      (call $check (call $set_input (i32.load (i32.const 4)) (i32.const 0) (i32.const 16)))
      {turn}
      (call $check (call $close (i32.load (i32.const 4))))
      (local.set $turn (i32.add (local.get $turn) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $turn) (i32.const {n_turns}))))))"""
_WHOLE: Final = """(call $check (call $compute (i32.load (i32.const 4))))
      (call $check (call $get_output
        (i32.load (i32.const 4)) (i32.const 0) (i32.const 65536) (i32.const 65536) (i32.const 8)))"""
_STREAM: Final = """(block $end (loop $piece
        (local.set $errno (call $compute_single (i32.load (i32.const 4))))
        (br_if $end (i32.eq (local.get $errno) (i32.const 100)))
        (call $check (local.get $errno))
        (call $check (call $get_output_single
          (i32.load (i32.const 4)) (i32.const 0) (i32.const 65536) (i32.const 65536) (i32.const 8)))
        (br $piece)))"""


@dataclass(frozen=True, slots=True)
class Workload:
    """Turns of one kind, each in a session of its own."""

    name: str
    n_turns: int
    n_tokens: int
    streams: bool

    @property
    def params(self) -> dict[str, Any]:
        return {"temperature": 0, "ignore_eos": True, "max_tokens": self.n_tokens}

    def guest(self) -> bytes:
        """Return a guest that does this work."""
        config = orjson.dumps(self.params)
        wat = _GUEST.replace("{n_prompt:08x}", "".join(f"\\{byte:02x}" for byte in len(PROMPT).to_bytes(4, "little")))
        values = {
            "prompt": PROMPT,
            "config": "".join(f"\\{byte:02x}" for byte in config),
            "n_config": str(len(config)),
            "n_turns": str(self.n_turns),
            "turn": _STREAM if self.streams else _WHOLE,
        }
        for name, value in values.items():
            wat = wat.replace(f"{{{name}}}", value)
        return bytes(wat2wasm(wat))

    async def run(self, client: Client) -> None:
        """Do this work with the Python client."""
        for _ in range(self.n_turns):
            async with client.session(params=self.params, store=False) as session:
                if self.streams:
                    async for _ in session.infer(PROMPT):
                        pass
                else:
                    await session.ask(PROMPT)


TURNS: Final = Workload("turn", n_turns=20, n_tokens=1, streams=False)
STREAMS: Final = Workload("token", n_turns=2, n_tokens=400, streams=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall time and CPU time of this process."""

    wall_s: float
    cpu_s: float


def measure(work: Callable[[], object]) -> Cost:
    """Return what a call takes."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def _with_client(loop: GuestLoop, workload: Workload, client: Client) -> None:
    loop.call(workload.run(client))


def main(
    url: Annotated[str, typer.Option(help="Address of the daemon.")] = "http://127.0.0.1:3000",
    token_file: Annotated[Path | None, typer.Option(help="File with the token; else INFERENCECENTER_TOKEN.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, each with both programs.")] = 30,
) -> None:
    """Print what a guest adds to each turn and to each streamed token."""
    token = token_file.read_text(encoding="ascii").strip() if token_file else os.environ["INFERENCECENTER_TOKEN"]
    loop, client = GuestLoop(), Client(url, token)
    loop.call(client.open())
    for workload in (TURNS, STREAMS):
        units = workload.n_turns * (workload.n_tokens if workload.streams else 1)
        guest = workload.guest()
        costs = []
        for number in range(rounds):
            run = GuestRun("guest", guest, client, loop, options=GuestOptions(), log=GuestLog(typer.echo))
            sdk = partial(_with_client, loop, workload, client)
            if number % 2:
                costs.append((measure(run.run), measure(sdk)))
            else:
                costs.append((measure(sdk), measure(run.run))[::-1])
        for kind in ("wall_s", "cpu_s"):
            with_guest, with_client = (
                [getattr(cost, kind) / units * 1e6 for cost in side] for side in zip(*costs, strict=True)
            )
            added = paired_difference(with_guest, with_client)
            typer.echo(
                f"{workload.name}, {kind}: client {median(with_client):.1f} us, guest adds {added.median:.1f} us"
                f" [{added.low:.1f}, {added.high:.1f}] ({added.coverage:.0%})"
            )
    loop.call(client.close())
    loop.close()


if __name__ == "__main__":
    typer.run(main)
