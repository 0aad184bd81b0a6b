"""The tables of the file of sessions, for whoever reads it with the ``sqlite3`` program too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferencecenter.core.sqlite_file import Steps

DATABASE_NAME: Final = "sessions.sqlite3"
"""Name of the file in the state directory."""

# ``session`` is ``sessions.id`` everywhere, ``n`` counts the rows of a session up.
MIGRATIONS: Final[Steps] = (
    (
        # ``seq`` is the number of the last event, unless ``said`` has a later one. ``config`` is what is settled when
        # it begins.
        """
        CREATE TABLE sessions (
            id INTEGER PRIMARY KEY,
            session_id TEXT NOT NULL UNIQUE,
            client_id TEXT NOT NULL,
            epoch TEXT NOT NULL,
            seq INTEGER NOT NULL,
            created_at REAL NOT NULL,
            last_used_at REAL NOT NULL,
            made_by TEXT NOT NULL,
            view_kept INTEGER NOT NULL,
            view_resumes_at INTEGER NOT NULL,
            facts TEXT NOT NULL
        ) STRICT
        """,
        "CREATE INDEX sessions_by_client ON sessions (client_id)",
        """
        CREATE TABLE messages (
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            n INTEGER NOT NULL,
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            PRIMARY KEY (session, n)
        ) STRICT, WITHOUT ROWID
        """,
        # The turns that have ended. ``ending`` is the event that told so, where a client may ask for it again.
        """
        CREATE TABLE turns (
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            n INTEGER NOT NULL,
            turn_id TEXT NOT NULL,
            finish_reason TEXT NOT NULL,
            messages INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            turn_key TEXT,
            ending TEXT,
            PRIMARY KEY (session, n)
        ) STRICT, WITHOUT ROWID
        """,
        # Where turns stand in the history: what a session can be taken back to.
        """
        CREATE TABLE marks (
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            n INTEGER NOT NULL,
            turn_id TEXT NOT NULL,
            n_before INTEGER NOT NULL,
            n_messages INTEGER NOT NULL,
            n_tokens INTEGER NOT NULL,
            n_chars INTEGER NOT NULL,
            view_kept INTEGER NOT NULL,
            view_resumes_at INTEGER NOT NULL,
            PRIMARY KEY (session, n)
        ) STRICT, WITHOUT ROWID
        """,
        # Packed token ids, and the text that they and those before them spell, piece by piece.
        """
        CREATE TABLE tokens (
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            n INTEGER NOT NULL,
            ids BLOB NOT NULL,
            covered TEXT NOT NULL,
            PRIMARY KEY (session, n)
        ) STRICT, WITHOUT ROWID
        """,
        # The turn that has not ended.
        """
        CREATE TABLE orders (
            session INTEGER PRIMARY KEY REFERENCES sessions ON DELETE CASCADE,
            turn_id TEXT NOT NULL,
            request TEXT NOT NULL,
            params TEXT NOT NULL,
            rank INTEGER NOT NULL,
            warnings TEXT NOT NULL,
            submitted_at REAL NOT NULL,
            rendered_at TEXT NOT NULL,
            made_by TEXT NOT NULL,
            view_kept INTEGER,
            view_resumes_at INTEGER
        ) STRICT
        """,
        # What that turn has said, in the order of the rows of all sessions. Without index or reference: it is written
        # for every generated token, and all rows of a step shall lie on one page.
        """
        CREATE TABLE said (
            session INTEGER NOT NULL,
            seq INTEGER NOT NULL,
            ids BLOB NOT NULL,
            text TEXT NOT NULL
        ) STRICT
        """,
        # By day in UTC, as 2026-11-21.
        """
        CREATE TABLE usage (
            client_id TEXT NOT NULL,
            day TEXT NOT NULL,
            turns INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            PRIMARY KEY (client_id, day)
        ) STRICT, WITHOUT ROWID
        """,
        # ``clean`` is 1 while nothing was written since the last orderly stop.
        "CREATE TABLE meta (clean INTEGER NOT NULL) STRICT",
        "INSERT INTO meta (clean) VALUES (1)",
    ),
    (
        # The name of the model that answers, empty where it was not written down.
        "ALTER TABLE orders ADD COLUMN model TEXT NOT NULL DEFAULT ''",
    ),
    (
        # The token that a turn counts for, empty for an API key.
        "ALTER TABLE orders ADD COLUMN token_id TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE usage RENAME TO usage_before",
        """
        CREATE TABLE usage (
            client_id TEXT NOT NULL,
            token_id TEXT NOT NULL,
            day TEXT NOT NULL,
            turns INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            PRIMARY KEY (client_id, token_id, day)
        ) STRICT, WITHOUT ROWID
        """,
        "INSERT INTO usage SELECT client_id, '', day, turns, prompt_tokens, cached_tokens, completion_tokens"
        " FROM usage_before",
        "DROP TABLE usage_before",
    ),
    (
        # What a message has besides its text, as JSON: what was thought, the tools that were asked for, or the call
        # that it is the result of.
        "ALTER TABLE messages ADD COLUMN more TEXT",
        # Text of whoever asked for the turn.
        "ALTER TABLE turns ADD COLUMN note TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE orders ADD COLUMN note TEXT NOT NULL DEFAULT ''",
        # What was shown where that is not the text, as JSON: parts of an answer.
        "ALTER TABLE said ADD COLUMN parts TEXT",
    ),
    (
        # Of the tokens that a turn made, those of what was thought.
        "ALTER TABLE turns ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0",
    ),
    (
        # Turns that failed and have a note. ``error`` is the event with the number ``seq`` that told so.
        """
        CREATE TABLE failures (
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            seq INTEGER NOT NULL,
            turn_id TEXT NOT NULL,
            error TEXT NOT NULL,
            note TEXT NOT NULL,
            PRIMARY KEY (session, seq)
        ) STRICT, WITHOUT ROWID
        """,
    ),
    (
        # 0 where the rows are no session's: they are being written in parts, or what others begin with, or they are
        # being deleted. It is not read, and a start deletes what no other refers to.
        "ALTER TABLE sessions ADD COLUMN complete INTEGER NOT NULL DEFAULT 1",
    ),
    (
        # What a session begins with: the first so many messages, rows of tokens, marks and turns of its ``base``, which
        # may begin with those of another. Its own rows count on from there. Turns from ``base_keys`` on were its own.
        "ALTER TABLE sessions ADD COLUMN base INTEGER REFERENCES sessions",
        "ALTER TABLE sessions ADD COLUMN base_messages INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_pieces INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_marks INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_turns INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_keys INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX sessions_by_base ON sessions (base) WHERE base IS NOT NULL",
    ),
)
