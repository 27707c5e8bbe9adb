#!/usr/bin/env bash
# OpenCode on /v1/chat/completions.
. "$(dirname "$0")/common.sh"
need_npm opencode "$OPENCODE"
mkdir -p "$RUN_HOME/.config/opencode"
cat >"$RUN_HOME/.config/opencode/opencode.json" <<JSON
{
  "autoupdate": false,
  "share": "disabled",
  "model": "ds4/$MODEL",
  "small_model": "ds4/$MODEL",
  "enabled_providers": ["ds4"],
  "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
  "provider": {
    "ds4": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$BASE_URL/v1", "apiKey": "$API_KEY"},
      "models": {"$MODEL": {"tool_call": true, "reasoning": true, "limit": {"context": $CONTEXT, "output": $OUTPUT}}}
    }
  }
}
JSON
run_clean OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 \
  "$CLIENTS_DIR/opencode/node_modules/.bin/opencode" run --thinking "$PROMPT"
