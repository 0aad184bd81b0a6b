"""What the models of the protocol cannot say: the rules around the frames."""

from __future__ import annotations

from typing import Final

RULES: Final = """\
JSON text frames over a WebSocket, one object a frame (a long answer comes in fragments), told apart by `op` (lower
snake case; accepted in any case, sent in lower). The endpoint answers at `/`, `/ws`, `/api/inference` and
`/api/inference/`. Fields and ops marked † are those of the first protocol, whose clients work unchanged.
`docs/protocol.schema.json` has the same as JSON Schema.

## Rules

- Every client frame may carry `id` (at most 64 characters). The direct reply and every error it causes echo it.
- An unknown `op`, an unknown field, a wrong type or a value out of range is answered by an `error` that names the
  field, the value and what is allowed. The connection and the session go on. Nothing is converted: a number in
  quotes is no number.
- Every session event carries `session_id` and `seq`, a counter per session that starts at 1 and is never reused
  within an `epoch`. `epoch` names the incarnation of a session's history of events.
- A socket that said `protocol: 1` in `hello` or `auth`, or chose the subprotocol `inferencecenter.v1`, is a v1
  socket. Every other is an old socket: it is sent only ops and fields marked †, and what it asks with another op
  is refused.
- Every event of a turn carries `turn_id`. A turn has exactly one last event: `end`, or `error` with its `turn_id`.
- `queued` is always a turn's first event; position 0 runs at once.
- A frame larger than `limits.max_frame_bytes` closes the socket with 1009. Binary frames are answered by an
  `error`.
- A second `infer` with the same `turn_key` on the same session attaches to the first turn and does not run again.
- A turn belongs to the client's trace when `infer` carries `traceparent`, or the upgrade had a header of that name
  (W3C Trace Context; a wrong header is passed over, a wrong field refused). Where it is recorded is the daemon's.
- A turn counts for the token that its socket showed. `limits` of `auth_success` says what that may use, `usage` what
  is left. Beyond a limit of a minute, or of turns at once, `infer` is answered by `rate_limited`; without tokens for
  the day by `quota_exceeded`, and a turn that runs then ends with that as its `finish_reason` and keeps what it said.
  Both carry `retry_after_ms`.
- A session belongs to the client (the account) that made it. Any other client's session is answered like one that
  does not exist.

## Authentication

The daemon says `hello` when a socket opens without credentials; `auth` with a token, or with `client_id` and
`api_key`, is answered by `auth_success` or `auth_failed`. Credentials may come with the upgrade instead:
`Authorization: Bearer <token>`, or `X-Client-ID` and `X-API-Key`, or for browsers the two subprotocols
`inferencecenter.v1, token.<token>`. The first frame is then `auth_success`; a wrong credential is refused with HTTP
401 and a JSON body. Before authentication anything but `hello` and `auth` is answered by `not_authenticated`, and a
socket that takes longer than `limits.auth_timeout_s` is closed with 4401. A token never goes into a URL."""

EVENTS: Final = """\
A field that is not always there is left out when it has no value, except in `metrics`, where it is `null`.
`content` is whole UTF-8; a stop string is never shown, nor any part of it."""

PARAMETERS: Final = """\
`params` of `create_session` holds for the session's turns, `params` of `infer` for one turn. Levels are laid over
each other: the model's own recommendations, the daemon's configuration, the session, the turn. Parameters stand
flat, under an alias, in the groups `sampling`, `stopping` and `memory`, or in the nested forms `dynatemp` {range,
exponent}, `dry` {multiplier, base, allowed_length, penalty_last_n, sequence_breakers}, `mirostat` {mode, tau, eta},
`xtc` {probability, threshold} and `adaptive` {target, decay}. The same one twice is an error, as is one that
llama.cpp does not have. A legal value that has no effect beside another is obeyed and named in `warnings`."""

CLOSING: Final = "What a socket is closed with. Codes from 4000 on are the daemon's own."
