# The Codex CLI with tools of an MCP server, which it offers in a namespace.
mkdir -p ~/.codex
cat > ~/.codex/config.toml <<END
model = "script"
model_provider = "inferencecenter"

[model_providers.inferencecenter]
name = "InferenceCenter"
base_url = "http://127.0.0.1:3000/v1"
env_key = "INFERENCECENTER_TOKEN"
wire_api = "responses"

[mcp_servers.almanac]
command = "node"
args = ["$PWD/almanac.mjs"]
END

cat > almanac.mjs <<END
import { createInterface } from "node:readline";

const tool = {
  name: "tide",
  description: "The next high tide at a harbour.",
  inputSchema: { type: "object", properties: { harbour: { type: "string" } }, required: ["harbour"] },
};
const results = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion,
    capabilities: { tools: {} },
    serverInfo: { name: "almanac", version: "1" },
  }),
  ping: () => ({}),
  "tools/list": () => ({ tools: [tool] }),
  "tools/call": ({ arguments: { harbour } }) => ({ content: [{ type: "text", text: \`\${harbour}: 14:05\` }] }),
};
for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const found = results[method];
  const answer = found ? { result: found(params) } : { error: { code: -32601, message: method } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...answer }));
}
END

codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json "When is high tide in Bergen?"
