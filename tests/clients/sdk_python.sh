#!/usr/bin/env bash
# The Python SDKs openai (Chat Completions, Responses) and anthropic (Messages).
. "$(dirname "$0")/common.sh"
need_pip py $PYTHON_CLIENTS
run_clean BASE_URL="$BASE_URL" MODEL="$MODEL" API_KEY="$API_KEY" PYTHONDONTWRITEBYTECODE=1 \
  "$CLIENTS_DIR/py/venv/bin/python" "$HERE/sdk_python.py" "$PROMPT"
