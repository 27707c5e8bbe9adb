#!/usr/bin/env bash
# OpenAI Codex CLI on /v1/responses.
. "$(dirname "$0")/common.sh"
need_npm codex "$CODEX"
mkdir -p "$RUN_HOME/.codex"
catalog=
if [ "$TURN" = plain ]; then # shorter instructions than those for a model that Codex does not know
  catalog="model_catalog_json = \"$RUN_HOME/.codex/models.json\""
  cat >"$RUN_HOME/.codex/models.json" <<JSON
{"models": [{"slug": "$MODEL", "display_name": "$MODEL", "visibility": "list", "supported_in_api": true, "priority": 1,
  "supported_reasoning_levels": [], "shell_type": "unified_exec", "support_verbosity": false,
  "experimental_supported_tools": [], "truncation_policy": {"mode": "tokens", "limit": 10000},
  "context_window": $CONTEXT, "input_modalities": ["text"], "base_instructions": "You are a helpful assistant."}]}
JSON
fi
cat >"$RUN_HOME/.codex/config.toml" <<TOML
model = "$MODEL"
model_provider = "ds4"
model_context_window = $CONTEXT
approval_policy = "never"
sandbox_mode = "danger-full-access"
show_raw_agent_reasoning = true
check_for_update_on_startup = false
web_search = "disabled"
$catalog
[analytics]
enabled = false
[features]
plugins = false
[model_providers.ds4]
name = "ds4"
base_url = "$BASE_URL/v1"
wire_api = "responses"
env_key = "DS4_API_KEY"
request_max_retries = 1
stream_max_retries = 1
TOML
run_clean CODEX_HOME="$RUN_HOME/.codex" DS4_API_KEY="$API_KEY" \
  "$CLIENTS_DIR/codex/node_modules/.bin/codex" exec --skip-git-repo-check "$PROMPT"
