"""OpenAI's models, chat completions and completions."""
