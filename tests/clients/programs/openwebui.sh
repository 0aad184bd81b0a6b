# Open WebUI with a model of each of its two kinds of connections, which it lists and chats with.
export OPENAI_API_BASE_URLS=http://127.0.0.1:3000/v1
export OPENAI_API_KEYS="$INFERENCECENTER_TOKEN"
export OLLAMA_BASE_URLS=http://127.0.0.1:3000
export OLLAMA_API_CONFIGS='{"0": {"enable": true, "key": "'"$INFERENCECENTER_TOKEN"'"}}'

# The test's own: no login, nothing from the internet, a port that is free.
export WEBUI_AUTH=False WEBUI_SECRET_KEY=test DATA_DIR="$PWD/data" OFFLINE_MODE=True HF_HUB_OFFLINE=1
export CORS_ALLOW_ORIGIN=http://127.0.0.1 BYPASS_EMBEDDING_AND_RETRIEVAL=True
port=$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
mkdir -p "$DATA_DIR"
open-webui serve --host 127.0.0.1 --port "$port" >open-webui.log 2>&1 &
trap "kill $! 2>/dev/null; wait $! 2>/dev/null || true" EXIT

python - "$port" <<END
import json
import sys
import time
import urllib.error
import urllib.request

SERVER = f"http://127.0.0.1:{sys.argv[1]}"


def request(path, body=None, token=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(SERVER + path, data, headers), timeout=60) as response:
        return response.read().decode()


def wait_started():
    deadline = time.monotonic() + 180
    while True:
        try:
            return request("/health")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def chat(model, text, **more):
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return request("/api/chat/completions", body, token)


def streamed(model):
    lines = chat(model, "Hello", stream=True).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", []))


wait_started()
token = json.loads(request("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
models = {each["id"]: each["owned_by"] for each in json.loads(request("/api/models", token=token))["data"]}
found = {}
for model in ("script", "script:latest"):
    answer = json.loads(chat(model, "Hello", stream=False))
    found[model] = [models[model], answer["choices"][0]["message"]["content"]]
print(json.dumps({"text": found, "streaming": [streamed(model) for model in found]}))
END
