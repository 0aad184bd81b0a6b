# The Claude Code CLI on a task.
export ANTHROPIC_BASE_URL=http://127.0.0.1:3000
export ANTHROPIC_AUTH_TOKEN="$INFERENCECENTER_TOKEN"
export ANTHROPIC_MODEL=script
export ANTHROPIC_DEFAULT_HAIKU_MODEL=script
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1

cd "$1"
echo "Hello, wrld" > notes.txt
claude -p "Fix the spelling in notes.txt." --output-format stream-json --verbose --allowedTools Bash Read Edit
