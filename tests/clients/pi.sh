#!/usr/bin/env bash
# Pi. PI_API picks the dialect: openai-completions, openai-responses or anthropic-messages. THEN is a second prompt,
# KEEP_RECENT how many tokens of the history are not summarised when the context is full.
. "$(dirname "$0")/common.sh"
need_node22
need_npm pi "$PI"
PI_API=${PI_API:-openai-completions}
url=$BASE_URL/v1
[ "$PI_API" != anthropic-messages ] || url=$BASE_URL
mkdir -p "$RUN_HOME/.pi/agent"
cat >"$RUN_HOME/.pi/agent/models.json" <<JSON
{"providers": {"ds4": {"baseUrl": "$url", "api": "$PI_API", "apiKey": "$API_KEY",
  "models": [{"id": "$MODEL", "reasoning": true, "input": ["text"], "contextWindow": $CONTEXT, "maxTokens": $OUTPUT}]}}}
JSON
echo "{\"compaction\": {\"keepRecentTokens\": ${KEEP_RECENT:-20000}}}" >"$RUN_HOME/.pi/agent/settings.json"
run_clean PI_CODING_AGENT_DIR="$RUN_HOME/.pi/agent" PI_OFFLINE=1 PI_TELEMETRY=0 \
  "$CLIENTS_DIR/pi/node_modules/.bin/pi" -p --mode json --provider ds4 --model "$MODEL" --thinking high --no-session \
  "$PROMPT" ${THEN:+"$THEN"}
