#!/usr/bin/env bash
# OpenAI Codex CLI on /v1/responses.
. "$(dirname "$0")/common.sh"
need_npm codex "$CODEX"
mkdir -p "$RUN_HOME/.codex"
cat >"$RUN_HOME/.codex/config.toml" <<TOML
model = "$MODEL"
model_provider = "ds4"
model_context_window = $CONTEXT
approval_policy = "never"
sandbox_mode = "danger-full-access"
show_raw_agent_reasoning = true
check_for_update_on_startup = false
web_search = "disabled"
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
