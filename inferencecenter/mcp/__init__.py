"""MCP client: tools of the servers that the operator declares."""
