# The Codex CLI on a task; the arguments are HTTP (false) or a WebSocket (true), and the model.
mkdir -p ~/.codex
cat > ~/.codex/config.toml <<END
model = "script"
model_provider = "inferencecenter"

[model_providers.inferencecenter]
name = "InferenceCenter"
base_url = "http://127.0.0.1:3000/v1"
env_key = "INFERENCECENTER_TOKEN"
wire_api = "responses"
END
echo "supports_websockets = $1" >> ~/.codex/config.toml

mkdir -p work && cd work
echo "Hello, wrld" > notes.txt
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model "$2" --json "Fix the spelling in notes.txt."
