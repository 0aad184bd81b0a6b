"""The daemon's APIs: its own over WebSockets, an OpenAI-compatible one over HTTP, and plain text.

They only map requests to sessions and events to responses.
"""
