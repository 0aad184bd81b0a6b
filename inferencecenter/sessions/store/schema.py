"""The schema of the session file and its migrations, commented for readers with the ``sqlite3`` program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferencecenter.core.sqlite_file import Steps

DATABASE_NAME: Final = "sessions.sqlite3"
"""Name of the file in the state directory."""

# ``session`` is ``sessions.id`` in all tables; ``n`` numbers the rows of a session.
MIGRATIONS: Final[Steps] = (
    (
        # ``seq`` is the number of the last event, unless ``said`` has a later one. ``facts`` are the settings that are
        # fixed at the start.
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
        # Finished turns. ``ending`` is the final event, stored if the turn has an idempotency key.
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
        # Positions of turns in the history, to which a session can be rewound.
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
        # Packed token ids and the text that they cover, in pieces.
        """
        CREATE TABLE tokens (
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            n INTEGER NOT NULL,
            ids BLOB NOT NULL,
            covered TEXT NOT NULL,
            PRIMARY KEY (session, n)
        ) STRICT, WITHOUT ROWID
        """,
        # The unfinished turn.
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
        # Output of the unfinished turns, in order. Without index or foreign key: it is written for every generated
        # token, and all rows of an engine step should be on one page.
        """
        CREATE TABLE said (
            session INTEGER NOT NULL,
            seq INTEGER NOT NULL,
            ids BLOB NOT NULL,
            text TEXT NOT NULL
        ) STRICT
        """,
        # ``day`` is in UTC, such as 2026-11-21.
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
        # ``clean`` is 1 if nothing was written since the last clean shutdown.
        "CREATE TABLE meta (clean INTEGER NOT NULL) STRICT",
        "INSERT INTO meta (clean) VALUES (1)",
    ),
    (
        # Name of the model, empty in rows of earlier versions.
        "ALTER TABLE orders ADD COLUMN model TEXT NOT NULL DEFAULT ''",
    ),
    (
        # The token that is charged for a turn, empty for an API key.
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
        # Other fields of a message as JSON: reasoning, tool calls, or the id of the call that it is the result of.
        "ALTER TABLE messages ADD COLUMN more TEXT",
        # Text that the submitter attached to the turn.
        "ALTER TABLE turns ADD COLUMN note TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE orders ADD COLUMN note TEXT NOT NULL DEFAULT ''",
        # Parts of the answer as JSON, where they differ from the text.
        "ALTER TABLE said ADD COLUMN parts TEXT",
    ),
    (
        # How many of the completion tokens are reasoning.
        "ALTER TABLE turns ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0",
    ),
    (
        # Failed turns with a note. ``error`` is the error event, with the number ``seq``.
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
        # 0 if the row is not a session: it is being written in chunks, is a base of others, or is being deleted.
        # Readers skip it, and a start deletes what nothing refers to.
        "ALTER TABLE sessions ADD COLUMN complete INTEGER NOT NULL DEFAULT 1",
    ),
    (
        # The shared prefix: how many messages, pieces of tokens, marks and turns of ``base`` a session begins with;
        # a base may have a base. Own rows continue the numbering. Turns from ``base_keys`` on were the session's own.
        "ALTER TABLE sessions ADD COLUMN base INTEGER REFERENCES sessions",
        "ALTER TABLE sessions ADD COLUMN base_messages INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_pieces INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_marks INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_turns INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN base_keys INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX sessions_by_base ON sessions (base) WHERE base IS NOT NULL",
    ),
    (
        # 1 for a session that no daemon holds in memory until it is used: its size and idle limit are in the columns
        # below, which are valid only then.
        "ALTER TABLE sessions ADD COLUMN archived INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN n_messages INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN n_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN n_chars INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN ttl_s REAL",
        "CREATE INDEX sessions_archived ON sessions (client_id, created_at, session_id) WHERE archived",
        "CREATE INDEX sessions_archived_by_use ON sessions (client_id, last_used_at, session_id) WHERE archived",
    ),
    (
        # Tool calls that ran on MCP servers when this was written, or whose outcome is unknown, as JSON.
        "ALTER TABLE sessions ADD COLUMN mcp_calls TEXT",
    ),
    (
        # What clients keep by name; ``body`` is a ``Preset`` as JSON.
        """
        CREATE TABLE presets (
            client_id TEXT NOT NULL,
            preset_type TEXT NOT NULL,
            name TEXT NOT NULL,
            body TEXT NOT NULL,
            PRIMARY KEY (client_id, preset_type, name)
        ) STRICT, WITHOUT ROWID
        """,
    ),
    (
        # Share links. ``messages`` is the snapshot, as JSON. By the session's id, as its row may change.
        """
        CREATE TABLE shares (
            share_id TEXT PRIMARY KEY,
            session_id TEXT NOT NULL,
            client_id TEXT NOT NULL,
            secret_sha256 BLOB NOT NULL,
            title TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            n_messages INTEGER NOT NULL,
            messages TEXT NOT NULL
        ) STRICT
        """,
        "CREATE INDEX shares_by_client ON shares (client_id)",
        "CREATE INDEX shares_by_session ON shares (session_id)",
    ),
    (
        # Unix seconds; null for turns that ended before there was this column.
        "ALTER TABLE turns ADD COLUMN ended_at REAL",
    ),
    (
        # The images of messages, whose files are in images.sqlite3; filled from ``more`` by the trigger.
        """
        CREATE TABLE message_images (
            session INTEGER NOT NULL,
            n INTEGER NOT NULL,
            digest TEXT NOT NULL,
            PRIMARY KEY (session, n, digest),
            FOREIGN KEY (session, n) REFERENCES messages ON DELETE CASCADE
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX message_images_by_digest ON message_images (digest)",
        """
        CREATE TRIGGER messages_with_images AFTER INSERT ON messages WHEN instr(NEW.more, '"images":') BEGIN
            INSERT OR IGNORE INTO message_images
            SELECT NEW.session, NEW.n, value ->> 'digest' FROM json_each(NEW.more, '$.images');
        END
        """,
    ),
)
