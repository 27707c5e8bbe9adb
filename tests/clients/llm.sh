#!/usr/bin/env bash
# The llm command on /v1/chat/completions, with two functions as tools.
. "$(dirname "$0")/common.sh"
need_pip llm "$LLM"
mkdir -p "$RUN_HOME/llm"
cat >"$RUN_HOME/llm/extra-openai-models.yaml" <<YAML
- model_id: local
  model_name: $MODEL
  api_base: "$BASE_URL/v1"
  api_key_name: local
  supports_tools: true
YAML
echo "{\"local\": \"$API_KEY\"}" >"$RUN_HOME/llm/keys.json"
more=(--functions "$HERE/tools.py")
[ "$TURN" != plain ] || more=()
run_clean LLM_USER_PATH="$RUN_HOME/llm" LLM_LOAD_PLUGINS= PYTHONDONTWRITEBYTECODE=1 \
  "$CLIENTS_DIR/llm/venv/bin/llm" prompt -m local ${more[@]+"${more[@]}"} "$PROMPT"
