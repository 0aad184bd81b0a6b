# llm, on the command line.
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: inferencecenter
  model_name: script
  api_base: http://127.0.0.1:3000/v1
  api_key_name: inferencecenter
  supports_tools: true
  supports_schema: true
END
llm keys set inferencecenter --value "$INFERENCECENTER_TOKEN"

export TEXT=$(llm -m inferencecenter --no-stream Hi)
export STREAMED=$(llm -m inferencecenter Hi)
export TOOLS=$(llm -m inferencecenter --functions 'def get_weather(city: str) -> str: return "sunny"' "How is the weather?")
export PERSON=$(llm -m inferencecenter --schema "name, age int" "Who is Ada?")
python - <<END
import json, os
from os import environ as of
print(json.dumps({"text": of["TEXT"], "streaming": of["STREAMED"], "tools": of["TOOLS"], "structured output": json.loads(of["PERSON"])}))
END
