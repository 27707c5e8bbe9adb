#!/usr/bin/env bash
# The Node SDKs openai, @anthropic-ai/sdk and ai.
. "$(dirname "$0")/common.sh"
need_node22
need_npm nodesdk $NODE_SDKS
run_clean BASE_URL="$BASE_URL" MODEL="$MODEL" API_KEY="$API_KEY" TURN="$TURN" OUTPUT="$OUTPUT" COUNT="${COUNT:-}" MODULES="$CLIENTS_DIR/nodesdk" \
  node "$HERE/sdk_node.mjs" "$PROMPT"
