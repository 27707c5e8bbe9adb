#!/usr/bin/env bash
# The llm command on /v1/chat/completions, with two functions as tools.
. "$(dirname "$0")/common.sh"
need_pip py $PYTHON_CLIENTS
mkdir -p "$RUN_HOME/llm"
cat >"$RUN_HOME/llm/extra-openai-models.yaml" <<YAML
- model_id: local
  model_name: $MODEL
  api_base: "$BASE_URL/v1"
  api_key_name: local
  supports_tools: true
YAML
echo "{\"local\": \"$API_KEY\"}" >"$RUN_HOME/llm/keys.json"
run_clean LLM_USER_PATH="$RUN_HOME/llm" LLM_LOAD_PLUGINS= PYTHONDONTWRITEBYTECODE=1 \
  "$CLIENTS_DIR/py/venv/bin/llm" prompt -m local --functions "$HERE/tools.py" "$PROMPT"
