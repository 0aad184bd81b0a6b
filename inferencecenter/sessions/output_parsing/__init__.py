"""Output parsing: how models write reasoning and tool calls, in grammars and in answers."""
