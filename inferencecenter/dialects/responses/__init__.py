"""OpenAI's Responses, over HTTP and over a WebSocket: one response is one turn of a session."""
