"""The APIs of the daemon: its own over WebSockets, OpenAI's over HTTP, and plain text.

They translate, and have no behaviour of their own.
"""
