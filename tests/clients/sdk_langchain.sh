#!/usr/bin/env bash
# LangChain: langchain-openai (Chat Completions, Responses) and langchain-anthropic (Messages).
. "$(dirname "$0")/common.sh"
run_sdk langchain sdk_langchain.py $LANGCHAIN
