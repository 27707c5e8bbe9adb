#!/usr/bin/env bash
# Runs a script of docs/clients.md (KIND: sh, python or js) with the programs or modules of a client. SETUP is the client.
. "$(dirname "$0")/common.sh"
case $SETUP in
codex) need_npm codex "$CODEX" ;;
claude) need_npm claude "$CLAUDE" ;;
opencode) need_npm opencode "$OPENCODE" ;;
pi) need_node22 && need_npm pi "$PI" ;;
nodesdk) need_node22 && need_npm nodesdk $NODE_SDKS ;;
aider) need_pip aider "$AIDER" ;;
llm) need_pip llm "$LLM" ;;
py) need_pip py $PYTHON_SDKS ;;
langchain) need_pip langchain $LANGCHAIN ;;
esac
PATH="$CLIENTS_DIR/$SETUP/node_modules/.bin:$CLIENTS_DIR/$SETUP/venv/bin:$PATH"
case $KIND in
sh) run_clean bash -euc "$PROMPT" ;;
python) run_clean python -c "$PROMPT" ;;
js)
  ln -s "$CLIENTS_DIR/nodesdk/node_modules" "$WORKDIR/node_modules"
  echo "$PROMPT" >"$WORKDIR/snippet.mjs"
  run_clean node snippet.mjs
  ;;
esac
