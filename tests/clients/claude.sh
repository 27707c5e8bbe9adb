#!/usr/bin/env bash
# Claude Code on /v1/messages. The event stream is printed: its text output leaves the thinking out.
. "$(dirname "$0")/common.sh"
need_npm claude "$CLAUDE"
mkdir -p "$RUN_HOME/.claude"
# A list of allowed tools rather than --dangerously-skip-permissions, which root may not use.
echo '{"permissions": {"allow": ["Bash", "Read", "Write", "Edit"], "defaultMode": "acceptEdits"}}' \
  >"$RUN_HOME/.claude/settings.json"
more=(--bare) # 4 kB of instructions and tools instead of 49
[ "$TURN" = plain ] || more=()
run_clean CLAUDE_CONFIG_DIR="$RUN_HOME/.claude" ANTHROPIC_BASE_URL="$BASE_URL" ANTHROPIC_AUTH_TOKEN="$API_KEY" \
  ANTHROPIC_MODEL="$MODEL" ANTHROPIC_DEFAULT_HAIKU_MODEL="$MODEL" \
  CLAUDE_CODE_MAX_CONTEXT_TOKENS="$CONTEXT" CLAUDE_CODE_MAX_OUTPUT_TOKENS="$OUTPUT" CLAUDE_CODE_ATTRIBUTION_HEADER=0 \
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_RETRIES=1 DISABLE_AUTOUPDATER=1 \
  "$CLIENTS_DIR/claude/node_modules/.bin/claude" -p --output-format stream-json --verbose ${more[@]+"${more[@]}"} \
  "$PROMPT"
