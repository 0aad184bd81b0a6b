"""Rules of the protocol that its models do not express."""

from __future__ import annotations

from typing import Final

RULES: Final = """\
Frames are JSON texts over a WebSocket, one object per frame (long replies are fragmented), distinguished by `op`
(lower snake case; accepted in any case, sent in lower). The endpoint answers at `/`, `/ws`, `/api/inference` and
`/api/inference/`. Fields and ops marked † belong to the first protocol, whose clients work unchanged.
`docs/protocol.schema.json` is the same contract as JSON Schema.

## Rules

- Every client frame may carry `id` (at most 64 characters). The direct reply and every error it causes echo it.
- An unknown `op`, an unknown field, a wrong type or a value out of range is answered by an `error` that names the
  field, the value and what is allowed. Connection and session continue. Types are not converted: a number in
  quotes is not a number.
- Every session event carries `session_id` and `seq`, a counter per session that starts at 1 and is never reused
  within an `epoch`. `epoch` identifies the incarnation of a session's event history.
- A socket that sent `protocol: 1` in `hello` or `auth`, or chose the subprotocol `inferencecenter.v1`, is a v1
  socket. All others are old sockets: they receive only ops and fields marked †, and other ops are refused.
- Every event of a turn carries `turn_id`. A turn has exactly one terminal event: `end`, or `error` with its
  `turn_id`.
- `queued` is always a turn's first event; position 0 runs immediately.
- A frame larger than `limits.max_frame_bytes` closes the socket with 1009. Binary frames are answered by an
  `error`.
- A second `infer` with the same `turn_key` on the same session attaches to the first turn and does not run again.
- A turn is part of the client's trace if `infer` carries `traceparent`, or the upgrade request had a header of that
  name (W3C Trace Context; an invalid header is ignored, an invalid field refused). The daemon's settings determine
  where it is exported.
- A turn counts for the token of its socket. `limits` of `auth_success` are that token's limits, `usage` returns the
  remaining quota. Beyond a limit per minute, or of concurrent turns, `infer` is answered by `rate_limited`; when the
  day's tokens are used up, by `quota_exceeded`, and a running turn then ends with that `finish_reason` and keeps its
  text. Both carry `retry_after_ms`.
- A session belongs to the client (the account) that created it. Another client's session is indistinguishable from
  one that does not exist.

## Authentication

The daemon sends `hello` when a socket opens without credentials; `auth` with a token, or with `client_id` and
`api_key`, is answered by `auth_success` or `auth_failed`. The upgrade request may carry the credentials instead:
`Authorization: Bearer <token>`, or `X-Client-ID` and `X-API-Key`, or for browsers the two subprotocols
`inferencecenter.v1, token.<token>`. The first frame is then `auth_success`; a wrong credential is refused with HTTP
401 and a JSON body. Before authentication all ops except `hello` and `auth` are answered by `not_authenticated`, and
a socket that takes longer than `limits.auth_timeout_s` is closed with 4401. Never put a token into a URL."""

EVENTS: Final = """\
Optional fields are omitted when they have no value, except in `metrics`, where they are `null`. `content` is whole
UTF-8 characters; no part of a stop string is ever sent."""

PARAMETERS: Final = """\
`params` of `create_session` apply to the session's turns, `params` of `infer` to one turn. Levels are merged in this
order: the model's recommendations, the daemon's configuration, the session, the turn. Parameters are given flat,
under an alias, in the groups `sampling`, `stopping` and `memory`, or in the nested forms `dynatemp` {range,
exponent}, `dry` {multiplier, base, allowed_length, penalty_last_n, sequence_breakers}, `mirostat` {mode, tau, eta},
`xtc` {probability, threshold} and `adaptive` {target, decay}. Giving a parameter twice is an error, as is one that
llama.cpp does not have. A valid value without effect beside another is accepted and named in `warnings`."""

CLOSING: Final = "Close codes of sockets. Codes from 4000 on are the daemon's own."
