#!/usr/bin/env bash
# The Python SDKs openai (Chat Completions, Responses) and anthropic (Messages).
. "$(dirname "$0")/common.sh"
run_sdk py sdk_python.py $PYTHON_SDKS
