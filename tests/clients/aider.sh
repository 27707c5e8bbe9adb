#!/usr/bin/env bash
# Aider on /v1/chat/completions: no tools, edit blocks in the text.
. "$(dirname "$0")/common.sh"
need_pip aider "$AIDER"
cat >"$RUN_HOME/models.json" <<JSON
{"openai/$MODEL": {"max_input_tokens": $CONTEXT, "max_output_tokens": $OUTPUT, "input_cost_per_token": 0,
  "output_cost_per_token": 0, "litellm_provider": "openai", "mode": "chat"}}
JSON
mode="--edit-format diff"
[ "$TURN" != plain ] || mode="--chat-mode ask"
run_clean OPENAI_API_BASE="$BASE_URL/v1" OPENAI_API_KEY="$API_KEY" LITELLM_LOCAL_MODEL_COST_MAP=True \
  "$CLIENTS_DIR/aider/venv/bin/aider" --model "openai/$MODEL" --model-metadata-file "$RUN_HOME/models.json" \
  $mode --no-git --yes-always --no-check-update --no-show-release-notes --analytics-disable \
  --no-show-model-warnings --no-pretty --no-detect-urls --no-suggest-shell-commands --no-fancy-input \
  --message "$PROMPT"
